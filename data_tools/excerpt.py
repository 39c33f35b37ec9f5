"""An excerpt of a corpus: some of its documents, for a machine that the whole corpus is too large for."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data_tools.corpus_manifest import MANIFEST, TOKENIZER, about_corpus, corpus_id, read_manifest
from data_tools.holdout import hash_fraction
from data_tools.outputs import already_made, corpus_prefixes, replace_file, write_errors
from moba_train.data.indexed import IndexedDataset, IndexedDatasetWriter
from moba_train.errors import DataError


def take_excerpt(folder: Path, output: str | Path, tokens: int, valid_tokens: int) -> dict[str, Any]:
    """Copy documents with at most `tokens` tokens of `train`, and with `valid_tokens` of each other corpus, into the
    folder `output`; returns its manifest.

    Documents are chosen by a hash of their number, in proportion from every source, and keep their order: the same
    arguments give the same bytes, and a larger excerpt has all documents of a smaller one, but for some that fill the
    end. Raises DataError when `folder` is no complete corpus, no document is that short, or `output` cannot be written.
    """
    whole = read_manifest(folder)
    target = Path(output)
    corpus_prefixes(str(target / "train"), 0)
    if target.resolve() == folder.resolve() or (target / MANIFEST).exists():
        raise DataError(f"--output {output} has a corpus already; give a new folder")
    corpora: dict[str, Any] = {}
    with write_errors(target):
        for name in whole["corpora"]:
            corpus = IndexedDataset(folder / name)
            wanted = _choose(corpus, tokens if name == "train" else valid_tokens)
            sources = _copy(corpus, wanted, target / name, whole["corpora"][name]["sources"])
            corpora[name] = about_corpus(IndexedDataset(target / name)) | {"sources": sources}
        shutil.copyfile(folder / TOKENIZER, target / TOKENIZER)
    manifest = whole | {
        "id": corpus_id(corpora),
        "excerpt": {"of": whole["id"], "tokens": tokens, "valid_tokens": valid_tokens},
        "corpora": corpora,
    }
    replace_file(target / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


def _choose(corpus: IndexedDataset, tokens: int) -> list[int]:
    """Documents in the order of a hash, as long as they fit into `tokens`; ascending."""
    lengths = corpus.document_lengths.tolist()
    chosen = []
    for document in sorted(range(len(lengths)), key=lambda number: hash_fraction(b"%d" % number, "excerpt")):
        if lengths[document] <= tokens:
            tokens -= lengths[document]
            chosen.append(document)
    if not chosen:
        raise DataError(f"{corpus.prefix}: every document has more than the {tokens:,} tokens that are asked for")
    return sorted(chosen)


def _copy(
    corpus: IndexedDataset, documents: list[int], prefix: Path, sources: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Write `documents`; returns the number of documents and tokens of each source, which follow one another."""
    taken = {source: {"documents": 0, "tokens": 0} for source in sources}
    of_document = [source for source, about in sources.items() for _ in range(about["documents"])]
    info = {
        key: (corpus.info or {}).get(key) for key in ("vocab_size", "tokenizer", "tokenizer_sha256", "bos_id", "eos_id")
    }
    work = hashlib.sha256(json.dumps([(corpus.info or {}).get("work"), documents]).encode()).hexdigest()
    already_made({str(prefix): work})
    with IndexedDatasetWriter(prefix, corpus.dtype, info | {"work": work}) as writer:
        for document in documents:
            content = corpus.document(document)
            writer.add_document(content)
            taken[of_document[document]]["documents"] += 1
            taken[of_document[document]]["tokens"] += len(content)
    return taken
