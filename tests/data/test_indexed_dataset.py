"""Corpora: the format equals Megatron's byte for byte, and a damaged file is always refused with a clear message."""

import dataclasses
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus_writer import IndexedDatasetWriter, dtype_for
from moba_train.config.data import SourceConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.samples import StageData
from moba_train.errors import DataError

# Five sequences in three documents, written out by hand: [1 2 3][4 5] | (none) | [6] [] [7 8].
LENGTHS = (3, 2, 1, 0, 2)
OFFSETS = (0, 6, 10, 12, 12)
TABLE = (0, 2, 2, 5)
BIN = struct.pack("<8H", *range(1, 9))
IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, len(LENGTHS), len(TABLE))
    + struct.pack("<5i", *LENGTHS)
    + struct.pack("<5q", *OFFSETS)
    + struct.pack("<4q", *TABLE)
)


def write_pair(prefix: Path, idx: bytes = IDX, tokens: bytes = BIN) -> Path:
    Path(f"{prefix}.idx").write_bytes(idx)
    Path(f"{prefix}.bin").write_bytes(tokens)
    return prefix


@pytest.mark.parametrize("modes", [b"", b"\x00" * 5])
def test_reads_documents_of_several_sequences(tmp_path: Path, modes: bytes) -> None:
    corpus = IndexedDataset(write_pair(tmp_path / "a", IDX + modes))
    assert (corpus.documents, corpus.tokens, corpus.dtype) == (3, 8, np.dtype("u2"))
    assert corpus.document_lengths.tolist() == [5, 0, 3]
    assert [corpus.document(i).tolist() for i in range(3)] == [[1, 2, 3, 4, 5], [], [6, 7, 8]]
    assert corpus.document(0, 2, 4).tolist() == [3, 4]
    assert corpus.document(2, 1).tolist() == [7, 8]
    assert corpus.info is None


def test_sequences_need_not_be_adjacent_in_the_bin(tmp_path: Path) -> None:
    gapped = IDX.replace(struct.pack("<5q", *OFFSETS), struct.pack("<5q", 0, 8, 12, 14, 14))
    corpus = IndexedDataset(write_pair(tmp_path / "a", gapped, struct.pack("<9H", 1, 2, 3, 99, 4, 5, 6, 7, 8)))
    assert corpus.document(0).tolist() == [1, 2, 3, 4, 5]


def test_writes_megatrons_bytes(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([7, 8, 9])
        writer.add_document([])
        writer.add_document([65535])
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == header + struct.pack("<3i3q4q", 3, 0, 1, 0, 6, 6, 0, 1, 2, 3)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4H", 7, 8, 9, 65535)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@given(documents=st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=12), cut=st.integers(0, 12))
def test_round_trip_written_at_once_or_merged(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], cut: int
) -> None:
    folder = tmp_path_factory.mktemp("corpus")
    parts = {"whole": documents, "part1": documents[:cut], "part2": documents[cut:]}
    for name, part in parts.items():
        with IndexedDatasetWriter(folder / name, np.int32) as writer:
            for document in part:
                writer.add_document(document)
    with IndexedDatasetWriter(folder / "merged", np.int32) as writer:
        writer.merge(folder / "part1")
        writer.merge(folder / "part2")
    whole = IndexedDataset(folder / "whole")
    assert [whole.document(i).tolist() for i in range(whole.documents)] == documents
    for suffix in (".bin", ".idx"):
        assert (folder / f"merged{suffix}").read_bytes() == (folder / f"whole{suffix}").read_bytes()


def test_merge_keeps_documents_of_several_sequences(tmp_path: Path) -> None:
    write_pair(tmp_path / "a")
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([9])
        writer.merge(tmp_path / "a")
    corpus = IndexedDataset(tmp_path / "b")
    assert [corpus.document(i).tolist() for i in range(4)] == [[9], [1, 2, 3, 4, 5], [], [6, 7, 8]]
    with (
        pytest.raises(DataError, match=r"cannot merge .*uint16.* into .*int32"),
        IndexedDatasetWriter(tmp_path / "c", np.int32) as writer,
    ):
        writer.merge(tmp_path / "a")


@pytest.mark.parametrize("broken", ["idx", "bin"])
def test_truncation_at_any_byte_is_refused_there(tmp_path: Path, broken: str) -> None:
    whole = {"idx": IDX, "bin": BIN}[broken]
    for size in range(len(whole)):
        write_pair(tmp_path / "a")
        (tmp_path / f"a.{broken}").write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"a\.{broken} is damaged at byte {size}:"):
            IndexedDataset(tmp_path / "a")


@pytest.mark.parametrize(
    ("byte", "value", "message"),
    [
        (0, b"X", "at byte 0: it begins with"),
        (9, b"\x02", "at byte 9: version 2"),
        (17, b"\x07", "at byte 17: dtype code 7"),
        (17, b"\x00", "at byte 17: dtype code 0"),
        (25, b"\xff", "the header announces"),
        (26, b"\x00", "at byte 26: the document table has no entry"),
        (38, b"\xff\xff\xff\xff", "at byte 38: a sequence has a negative length"),
        (54, b"\x05", "at byte 54: an offset falls between two tokens"),
        (54, b"\x10", "at byte 62: the sequence offsets decrease"),
        (61, b"\x80", "at byte 54: a sequence has an impossible offset"),
        (94, b"\x01", "at byte 94: the document table does not begin with 0"),
        (102, b"\x04", "at byte 110: the document table decreases"),
        (118, b"\x04", "at byte 118: the document table does not end with 5"),
        (34 + 16, b"\x03", "a.bin is damaged at byte 16"),
    ],
)
def test_inconsistent_tables_are_refused(tmp_path: Path, byte: int, value: bytes, message: str) -> None:
    write_pair(tmp_path / "a", IDX[:byte] + value + IDX[byte + len(value) :])
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "a")


@given(position=st.integers(0, len(IDX) - 1), value=st.integers(0, 255))
def test_no_damaged_byte_causes_another_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    prefix = write_pair(tmp_path_factory.mktemp("corpus") / "a", IDX[:position] + bytes([value]) + IDX[position + 1 :])
    try:
        corpus = IndexedDataset(prefix)
    except DataError:
        return
    for document in range(corpus.documents):
        assert len(corpus.document(document)) == corpus.document_lengths[document]


def test_missing_files_and_bad_sidecars_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.idx: No such file"):
        IndexedDataset(tmp_path / "nowhere")
    write_pair(tmp_path / "a")
    for content, message in (("{", "is not JSON"), ("[]", "holds list"), ('{"vocab_size": "1"}', "vocab_size is '1'")):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=rf"a\.json:? {message}"):
            IndexedDataset(tmp_path / "a")


def test_a_failed_writer_leaves_nothing_and_keeps_the_old_corpus(tmp_path: Path) -> None:
    write_pair(tmp_path / "a")

    def write_and_fail() -> None:
        with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
            writer.add_document([1])
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_and_fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert IndexedDataset(tmp_path / "a").tokens == 8


def test_ids_that_do_not_fit_the_dtype_are_refused(tmp_path: Path) -> None:
    assert (dtype_for(65499), dtype_for(65500)) == (np.dtype("u2"), np.dtype("i4"))
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document([0, 65535])
        for bad in (-1, 65536):
            with pytest.raises(DataError, match="document 1 has token ids"):
                writer.add_document([5, bad])


def test_sidecar_counts_what_was_written(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", np.int32, {"vocab_size": 10}) as writer:
        writer.add_document([1, 2])
    digest = hashlib.sha256(struct.pack("<2i", 1, 2)).hexdigest()
    assert IndexedDataset(tmp_path / "a").info == {
        "vocab_size": 10,
        "documents": 1,
        "tokens": 2,
        "min_id": 1,
        "max_id": 2,
        "bin_sha256": digest,
        "idx_sha256": hashlib.sha256((tmp_path / "a.idx").read_bytes()).hexdigest(),
        "sampled_sha256": hashlib.sha256(struct.pack("<Q2i", 8, 1, 2)).hexdigest(),
    }
    assert json.loads((tmp_path / "a.json").read_text())["vocab_size"] == 10


def test_fingerprints_are_of_content(tmp_path: Path) -> None:
    """Equal for a copy; its parts say whether document lengths or tokens differ."""
    first = IndexedDataset(write_pair(tmp_path / "a")).fingerprint
    assert IndexedDataset(write_pair(tmp_path / "b")).fingerprint == first
    longer = IndexedDataset(write_pair(tmp_path / "c", IDX[:50] + b"\x03" + IDX[51:], BIN + b"\x00\x00")).fingerprint
    other = IndexedDataset(write_pair(tmp_path / "d", IDX, BIN[:-2] + b"\x09\x00")).fingerprint
    assert first.difference(first) is None
    assert first.difference(longer) == "other document lengths"
    assert first.difference(other) == "other tokens in documents of the same lengths"
    assert other.index == first.index
    assert len({first.name, longer.name, other.name}) == 3


def test_a_token_that_is_not_sampled_differs_by_the_hash_of_the_whole_file(tmp_path: Path) -> None:
    """600,000 tokens, 2.4 MB; 64 blocks of 1,024 tokens are sampled, at even distances."""
    tokens = np.full(600_000, 7, dtype=np.int32)
    for name, place in (("a", 0), ("b", 5000), ("c", 599_999)):
        changed = tokens.copy()
        changed[place] = 8
        with IndexedDatasetWriter(tmp_path / name, np.int32, {}) as writer:
            writer.add_document(tokens if name == "a" else changed)
    a, b, c = (IndexedDataset(tmp_path / name).fingerprint for name in "abc")
    assert a.tokens == b.tokens != c.tokens
    assert a.difference(b) == a.difference(c) == "other tokens in documents of the same lengths"
    assert dataclasses.replace(a, bin_sha256=None).difference(b) is None, "a sidecar that was lost is no difference"


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_that_is_not_what_was_written_is_refused(tmp_path: Path, suffix: str) -> None:
    """A file of the right size, with contents that are possible: tokens when the corpus is opened, the index when it is
    hashed."""
    for name, lengths in (("a", (3, 4)), ("b", (4, 3))):
        with IndexedDatasetWriter(tmp_path / name, np.int32, {"vocab_size": 100}) as writer:
            for length in lengths:
                writer.add_document(range(length))
    (tmp_path / f"a.{suffix}").write_bytes((tmp_path / f"b.{suffix}").read_bytes())
    with pytest.raises(DataError, match=rf"a\.{suffix} is not what was written"):
        _ = IndexedDataset(tmp_path / "a").fingerprint


def test_reading_needs_no_torch() -> None:
    code = "import sys, moba_train.data.samples; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_corpora_of_other_tools_can_be_trained_on(tmp_path: Path, code: int, letter: str) -> None:
    """Any integer dtype of Megatron, several sequences per document, modes, and no sidecar."""
    idx = IDX[:17] + bytes([code]) + IDX[18:]
    offsets = struct.pack("<5q", *(struct.calcsize(f"<{letter}") * offset // 2 for offset in OFFSETS))
    idx = idx.replace(struct.pack("<5q", *OFFSETS), offsets) + b"\x00" * 5
    prefix = write_pair(tmp_path / "a", idx, struct.pack(f"<8{letter}", *range(1, 9)))
    data = StageData([SourceConfig(path=str(prefix))], 8, 1, 0, {}, 9)
    sample = data.sample(0)
    assert sorted(sample.tokens.tolist()) == list(range(1, 9))
    assert sorted(sample.lengths) == [3, 5]
    assert (sample.tokens.dtype, sample.loss_weight.sum()) == (np.dtype("i8"), 6)
