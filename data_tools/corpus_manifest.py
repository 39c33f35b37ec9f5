"""The manifest of a corpus of long documents, by which result files refer to it, and excerpts with manifests of their
own, for machines that the whole corpus is too large for.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from data_tools.corpus_writer import IndexedDatasetWriter
from data_tools.outputs import already_made, corpus_prefixes, hash_fraction, replace_file, write_errors
from data_tools.stats import length_histogram
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete corpus. Raises DataError when there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise DataError(f"{folder} has no complete corpus: no {MANIFEST} ({error.strerror})") from error
    except ValueError as error:
        raise DataError(f"{folder / MANIFEST} is not JSON ({error}); make the corpus again") from error
    return found


def about_corpus(corpus: IndexedDataset) -> dict[str, Any]:
    """Numbers and hashes of a corpus that our tools wrote, and its documents by length (`length_histogram`)."""
    info = corpus.info or {}
    return {
        **{key: info[key] for key in ("documents", "tokens", "bin_sha256", "idx_sha256")},
        "lengths": [list(row) for row in length_histogram(corpus.document_lengths)],
    }


def corpus_id(corpora: Mapping[str, Mapping[str, Any]]) -> str:
    """Name for corpora, equal if all their bytes are equal."""
    hashes = {name: [about["bin_sha256"], about["idx_sha256"]] for name, about in corpora.items()}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


def manifest_tables(manifest: Mapping[str, Any]) -> list[Table]:
    """Tables of the files that were read of each source, the documents that they became, and the documents of each
    corpus by length."""
    corpora = manifest["corpora"]
    became = Table(title="documents and tokens by source")
    became.add_column("source")
    for corpus in corpora:
        became.add_column(f"{corpus}: documents", justify="right")
        became.add_column("tokens", justify="right")
    for source in {source: None for about in corpora.values() for source in about["sources"]}:
        found = [about["sources"].get(source) for about in corpora.values()]
        cells = [f"{each[key]:,}" if each else "" for each in found for key in ("documents", "tokens")]
        became.add_row(source, *cells)
    became.add_section()
    became.add_row("all", *(f"{about[key]:,}" for about in corpora.values() for key in ("documents", "tokens")))
    return [_files_table(manifest["sources"]), became, _lengths_table(corpora)]


def _files_table(sources: Mapping[str, Any]) -> Table:
    table = Table(title="files read")
    table.add_column("source")
    for column in ("files", "held out", "MB of text", "left out, by reason", "tokens in no document"):
        table.add_column(column, justify="right")
    for source, about in sources.items():
        files = about["files"]
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(about["left_out"].items()))
        megabytes = sum(about["bytes"].values()) / 1e6
        left_out = f"{about['tokens_left_out']:,}"
        table.add_row(source, f"{sum(files.values()):,}", f"{files['valid']:,}", f"{megabytes:.1f}", reasons, left_out)
    return table


def _lengths_table(corpora: Mapping[str, Any]) -> Table:
    table = Table(title="documents by length, and their share of the tokens")
    table.add_column("up to", justify="right")
    for corpus in corpora:
        table.add_column(corpus, justify="right")
        table.add_column("", justify="right")
    for bound in sorted({row[0] for about in corpora.values() for row in about["lengths"]}):
        cells = []
        for about in corpora.values():
            documents, tokens = next((row[1:] for row in about["lengths"] if row[0] == bound), (0, 0))
            cells += [f"{documents:,}", f"{tokens / max(about['tokens'], 1):.1%}"]
        table.add_row(f"{bound:,}", *cells)
    return table


def take_excerpt(folder: Path, output: str | Path, tokens: int, valid_tokens: int) -> dict[str, Any]:
    """Copy documents with at most `tokens` tokens of `train`, and with `valid_tokens` of each other corpus, into the
    folder `output`, and return its manifest.

    Documents are chosen by a hash of their number, in proportion from every source, and keep their order. Equal
    arguments give equal bytes, and a larger excerpt has all documents of a smaller one, except some that fill its end.
    Raises DataError when `folder` is no complete corpus, no document is that short, or `output` cannot be written.
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
        replace_file(target / TOKENIZER, (folder / TOKENIZER).read_bytes())
    manifest = whole | {
        "id": corpus_id(corpora),
        "excerpt": {"of": whole["id"], "tokens": tokens, "valid_tokens": valid_tokens},
        "corpora": corpora,
    }
    replace_file(target / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
    return manifest


def _choose(corpus: IndexedDataset, tokens: int) -> list[int]:
    """Documents that fit into `tokens`, taken in the order of a hash; ascending."""
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
    """Write `documents`, and return the number of documents and tokens of each source. The sources follow one another
    in the corpus."""
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
