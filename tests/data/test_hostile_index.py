"""A malicious corpus index gives a corpus or a DataError, never another exception, and never allocates more memory than
the file has bytes."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.data.indexed import HEADER, MAGIC, IndexedDataset
from moba_train.errors import DataError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    prefix = tmp_path_factory.mktemp("hostile") / "a"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in (3, 0, 5):
            writer.add_document(range(length))
    return prefix, Path(f"{prefix}.idx").read_bytes()


def open_and_read(prefix: Path, index: bytes) -> None:
    Path(f"{prefix}.idx").write_bytes(index)
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        assert str(prefix) in str(error)  # noqa: PT017 - other exceptions must come through
        return
    assert sum(len(dataset.document(index)) for index in range(dataset.documents)) == dataset.tokens


edge = st.integers(0, 8) | st.sampled_from([2**31 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1])


@given(version=st.just(1) | edge, code=st.integers(0, 255), sequences=edge, entries=edge, body=st.binary(max_size=96))
def test_any_header(
    corpus: tuple[Path, bytes], version: int, code: int, sequences: int, entries: int, body: bytes
) -> None:
    open_and_read(corpus[0], HEADER.pack(MAGIC, version, code, sequences, entries) + body)


@given(numbers=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 16), min_size=3, max_size=3), data=st.data())
def test_any_tables(corpus: tuple[Path, bytes], numbers: list[int], data: st.DataObject) -> None:
    wide = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 16)
    tables = data.draw(st.lists(wide, min_size=7, max_size=7))
    open_and_read(corpus[0], HEADER.pack(MAGIC, 1, 8, 3, 4) + struct.pack("<3i7q", *numbers, *tables))


@given(edits=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), cut=st.integers(0, 200))
def test_any_damage(corpus: tuple[Path, bytes], edits: list[tuple[int, int]], cut: int) -> None:
    prefix, whole = corpus
    content = bytearray(whole)
    for position, value in edits:
        content[position % len(content)] = value
    open_and_read(prefix, bytes(content[: len(content) - cut] if cut < len(content) else content))
