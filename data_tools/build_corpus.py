"""A corpus of real long documents, from sources to `train`, `valid` and `recall-valid`: `moba-data corpus`.

Each step leaves a file that is complete or absent in OUTPUT/work, so a build that was killed continues, and its bytes
are those of one that was not:

1. the files of each source, without duplicates, split by folder (corpus_files)
2. a tokenizer, trained on a sample of the training files
3. the tokens of every file (tokenize_corpus)
4. synthetic recall documents (long_range) and their tokens
5. files joined to long documents (corpus_files), written as corpora with a manifest
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_tools.corpus_files import (
    SPLITS,
    Document,
    FilePart,
    FileReport,
    files_of,
    gather_files,
    group_files,
    read_report,
)
from data_tools.corpus_manifest import MANIFEST, TOKENIZER, about_corpus, corpus_id, read_manifest
from data_tools.corpus_sources import Source
from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from data_tools.encoders import Encoder, load_encoder
from data_tools.long_range import RECALL_WEIGHTS, write_long_range
from data_tools.outputs import (
    already_made,
    corpus_prefixes,
    hash_fraction,
    locked_folder,
    replace_file,
    write_errors,
    writing_file,
)
from data_tools.tokenize_corpus import TokenizeOptions, tokenize_corpus
from data_tools.train_tokenizer import train_tokenizer
from moba_train.data.indexed import IndexedDataset
from moba_train.errors import DataError
from moba_train.foreign_files import MIB


@dataclass(frozen=True)
class CorpusOptions:
    """Options of a corpus, which determine it together with its sources. Their names are those in the manifest."""

    vocab_size: int = 16384
    holdout: float = 0.02
    """Largest share of the text of each source that goes to validation, in whole folders."""
    min_tokens: int = 32768
    """Length of the shortest document of real text."""
    max_tokens: int = 524288
    """Length of the longest document of real text."""
    recall_share: float = 0.05
    """Share of synthetic recall documents in the training tokens."""
    seed: int = 0

    def recall_documents(self, tokens: float, least: int) -> dict[int, int]:
        """Number of recall documents by their length in tokens: `tokens` in equal shares of three lengths, and at least
        `least` documents of each."""
        lengths = (max(self.min_tokens // 4, 1), self.min_tokens, 4 * self.min_tokens)
        return {length: max(round(tokens / len(lengths) / length), least) for length in lengths}


PROBE_CHARACTERS = 200_000
"""Length of the document that the number of characters of a token is measured on."""

MARGIN = 1.1
"""Factor by which texts are longer than asked for, because the number of characters of a token varies."""


def characters_per_token(texts: Path, probe: Path, encoder: Encoder) -> float:
    """Mean number of characters of a token, measured on one recall document, which has passages of `texts` and is
    written to `probe`."""
    write_long_range([str(texts)], probe, 1, PROBE_CHARACTERS, "probe", weights=RECALL_WEIGHTS)
    text = json.loads(probe.read_bytes())["text"]
    return len(text) / len(encoder.encode([text])[0])


def write_recall(
    texts: Path, folder: Path, split: str, documents: Mapping[int, int], ratio: float, seed: int
) -> list[Path]:
    """Write recall documents, a file for each length, unless it is complete already, and return the files. Nearly all
    documents are a little longer than asked for, so that they can be cut to the length.

    texts: JSON lines that passages are taken from
    documents: number of documents by length in tokens
    ratio: characters per token

    Raises DataError when no text is long enough to take passages from.
    """
    files = []
    for length, count in documents.items():
        file = folder / f"recall-{split}-{length}.jsonl"
        files.append(file)
        if not file.exists():
            own_seed = f"{seed}/{split}/{length}"
            write_long_range(
                [str(texts)], file, count, round(length * ratio * MARGIN), own_seed, weights=RECALL_WEIGHTS
            )
    return files


RECALL_VALID = "recall-valid"
SAMPLE_BYTES = 32 * MIB
"""Text that the tokenizer is trained on, and that the passages of recall documents are taken from."""
RECALL_VALID_DOCUMENTS = 8
"""Recall documents of each length in `recall-valid`, at least."""


def build_corpus(sources: Sequence[Source], output: str | Path, options: CorpusOptions, workers: int) -> dict[str, Any]:
    """Build a corpus in the folder `output`, or the missing part of it, and return its manifest.

    The bytes depend only on the sources and the options. Raises DataError when a source cannot be read, the text is too
    short, or the folder has a corpus of other sources or options.
    """
    folder = Path(output)
    corpus_prefixes(str(folder / "train"), 0)
    settings = {"sources": {source.name: source.identity() for source in sources}, **asdict(options)}
    work = folder / "work"
    with write_errors(folder), locked_folder(work):
        if not (folder / MANIFEST).exists():
            corpora = ("train", "valid", RECALL_VALID)
            already_made({str(folder / corpus): _fingerprint(corpus, settings) for corpus in corpora})
            _check_settings(work / "settings.json", settings)
            replace_file(work / "settings.json", json.dumps(settings).encode())
            reports = _gather(sources, work, options.holdout)
            _train_tokenizer(reports, work, options.vocab_size)
            manifest = _write_corpora(reports, work, folder, options, settings, workers)
            replace_file(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
        _empty(work)
    manifest = read_manifest(folder)
    _compare_settings(manifest["settings"], settings, folder, "choose another --output")
    return manifest


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    if file.exists():
        remedy = f"give the same ones to continue, or delete {file.parent} to begin again"
        _compare_settings(json.loads(file.read_bytes()), settings, file.parent, remedy)


def _compare_settings(before: dict[str, Any], now: dict[str, Any], folder: Path, remedy: str) -> None:
    """Raise DataError when the settings differ."""
    for key in now:
        if before.get(key) != now[key]:
            was, given = before.get(key), now[key]
            if isinstance(given, dict) and isinstance(was, dict):
                name = next(name for name in {**was, **given} if was.get(name) != given.get(name))
                was, given = ({name: value.get(name)} for value in (was, given))
            raise DataError(f"{folder} was begun with other settings: {key} was {was}, now {given}; {remedy}")


def _gather(sources: Sequence[Source], work: Path, holdout: float) -> dict[str, FileReport]:
    """Reports of the files of every source, which are read now or were read earlier."""
    reports: dict[str, FileReport] = {}
    for source in sources:
        earlier = [digest for report in reports.values() for digest in report.digests]
        reports[source.name] = read_report(work, source.name) or gather_files(source, work, holdout, earlier)
    for split in SPLITS if holdout else SPLITS[:1]:
        if not any(report.files(split) for report in reports.values()):
            raise DataError(
                f"no folder of {', '.join(reports)} falls into {split!r} with --holdout {holdout}; give another share, "
                "or sources with more and smaller folders"
            )
    return reports


def _train_tokenizer(reports: dict[str, FileReport], work: Path, vocab_size: int) -> None:
    """Write a sample of the training files, and train the tokenizer on it."""
    fraction = SAMPLE_BYTES / max(sum(report.bytes("train") for report in reports.values()), 1)
    _copy_texts(reports, work, "train", fraction)
    if not (work / TOKENIZER).exists():
        train_tokenizer([str(_texts(work, "train"))], work / TOKENIZER, vocab_size, "text")


def _texts(work: Path, split: str) -> Path:
    """File that `_copy_texts` writes."""
    return work / f"texts-{split}.jsonl"


def _copy_texts(reports: dict[str, FileReport], work: Path, split: str, fraction: float) -> None:
    """Copy the lines of a split's files, or about this fraction of them, unless that was done earlier."""
    if _texts(work, split).exists():
        return
    with writing_file(_texts(work, split)) as stream:
        for name, report in reports.items():
            wanted = set(report.files(split))
            with files_of(work, name).open("rb") as lines:
                stream.writelines(
                    line
                    for file, line in enumerate(lines)
                    if file in wanted and hash_fraction(line, "sample") < fraction
                )


def _write_corpora(
    reports: dict[str, FileReport], work: Path, folder: Path, options: CorpusOptions, settings: Any, workers: int
) -> dict[str, Any]:
    """Write all corpora, and return the manifest."""
    encoder = load_encoder(str(work / TOKENIZER))
    tokens, documents, left_out = _documents(reports, work, options, workers)
    _copy_texts(reports, work, "valid", 1)
    recall = _recall(documents, work, encoder, options, workers)
    contents: dict[str, Contents] = {
        split: {name: (tokens, parts) for name, parts in by_source.items()} for split, by_source in documents.items()
    }
    for split, found in recall.items():
        contents.setdefault("train" if split == "train" else RECALL_VALID, {})["recall"] = found
    sources: dict[str, Any] = {
        name: {
            "files": {split: len(report.files(split)) for split in SPLITS},
            "bytes": {split: report.bytes(split) for split in SPLITS},
            "left_out": report.left_out,
            "tokens_left_out": left_out[name],
        }
        for name, report in reports.items()
    }
    corpora = {
        corpus: _write_corpus(folder / corpus, content, encoder, settings) for corpus, content in contents.items()
    }
    replace_file(folder / TOKENIZER, (work / TOKENIZER).read_bytes())
    return {
        "id": corpus_id(corpora),
        "settings": settings,
        "tokenizer": {"file": TOKENIZER, "sha256": encoder.sha256, "vocab_size": encoder.vocab_size},
        "sources": sources,
        "corpora": corpora,
    }


Contents = dict[str, tuple[IndexedDataset, list[Document]]]
"""Documents of a corpus by source, each made of files. The tokens of a file are one document of the dataset."""


def _documents(
    reports: dict[str, FileReport], work: Path, options: CorpusOptions, workers: int
) -> tuple[IndexedDataset, dict[str, dict[str, list[Document]]], dict[str, int]]:
    """The tokens of all files; the documents by split and source; tokens that are in no document, by source."""
    tokens = _tokenize([files_of(work, name) for name in reports], work, "tokens", workers)
    documents: dict[str, dict[str, list[Document]]] = {}
    left_out = dict.fromkeys(reports, 0)
    first = 0
    for name, report in reports.items():
        for split in SPLITS:
            if files := report.files(split):
                paths = [report.paths[file] for file in files]
                lengths = tokens.document_lengths[[first + file for file in files]].tolist()
                # One token less each: the end of the document is added.
                found, short = group_files(paths, lengths, options.min_tokens - 1, options.max_tokens - 1)
                documents.setdefault(split, {})[name] = [
                    [part._replace(file=first + files[part.file]) for part in parts] for parts in found
                ]
                left_out[name] += short
        first += len(report.paths)
    assert first == tokens.documents
    for split in SPLITS if options.holdout else SPLITS[:1]:
        if not any(documents[split].values()):
            raise DataError(
                f"the {tokens.documents:,} files make no document of --min-tokens {options.min_tokens} for {split!r}; "
                "give more text, shorter documents or another --holdout"
            )
    return tokens, documents, left_out


def _recall(
    documents: dict[str, dict[str, list[Document]]], work: Path, encoder: Encoder, options: CorpusOptions, workers: int
) -> dict[str, tuple[IndexedDataset, list[Document]]]:
    """Synthetic documents by split, with passages of the split's files; none if their share is 0."""
    if not options.recall_share:
        return {}
    ratio = characters_per_token(_texts(work, "train"), work / "probe.jsonl", encoder)
    files = []
    sizes = {}
    for split, by_source in documents.items():
        parts = itertools.chain(*itertools.chain(*by_source.values()))
        real = sum(part.stop - part.start for part in parts)
        wanted = real * options.recall_share / (1 - options.recall_share)
        sizes[split] = options.recall_documents(wanted, 1 if split == "train" else RECALL_VALID_DOCUMENTS)
        files += write_recall(_texts(work, split), work, split, sizes[split], ratio, options.seed)
    tokens = _tokenize(files, work, "recall", workers)
    found = {}
    index = itertools.count()
    for split, documents_of_length in sizes.items():
        lengths = [length for length, count in documents_of_length.items() for _ in range(count)]
        # The texts are a little longer, and each document ends with one more token.
        parts_of = ((next(index), length - 1) for length in lengths)
        found[split] = (
            tokens,
            [[FilePart(file, 0, min(int(tokens.document_lengths[file]), stop))] for file, stop in parts_of],
        )
    return found


def _tokenize(files: Sequence[Path], work: Path, name: str, workers: int) -> IndexedDataset:
    """A dataset in `work` whose documents are the tokens of each text, without a mark of its end."""
    options = TokenizeOptions(str(work / TOKENIZER), "text", append_eos=False, holdout=0.0, fail_on_error=True)
    output = str(work / name)
    return tokenize_corpus(list(map(str, files)), output, options, workers).corpora[output]


def _write_corpus(prefix: Path, contents: Contents, encoder: Encoder, settings: Any) -> dict[str, Any]:
    """Write one corpus, and return its entry in the manifest."""
    dtype = dtype_for(encoder.vocab_size)
    eos = np.array([encoder.eos_id], dtype)
    info = {
        "vocab_size": encoder.vocab_size,
        "tokenizer": TOKENIZER,
        "tokenizer_sha256": encoder.sha256,
        "bos_id": None,
        "eos_id": encoder.eos_id,
        "work": _fingerprint(prefix.name, settings),
    }
    sources = {}
    with IndexedDatasetWriter(prefix, dtype, info) as writer:
        for name, (tokens, documents) in contents.items():
            before = (writer.documents, writer.tokens)
            for parts in documents:
                writer.add_document(np.concatenate([*(tokens.document(*part) for part in parts), eos]))
            sources[name] = {"documents": writer.documents - before[0], "tokens": writer.tokens - before[1]}
    return about_corpus(IndexedDataset(prefix)) | {"sources": sources}


def _fingerprint(corpus: str, settings: dict[str, Any]) -> str:
    """`work` of the sidecar: SHA-256 of everything that determines the corpus."""
    return hashlib.sha256(json.dumps([corpus, settings]).encode()).hexdigest()


def _empty(work: Path) -> None:
    for entry in work.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
