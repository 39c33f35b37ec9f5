"""Small corpora for the data tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from tests.data.corpora import MakeCorpus


@pytest.fixture
def make_corpus(tmp_path: Path) -> MakeCorpus:
    """`make_corpus(name, documents, info=None)` writes an int32 corpus and returns its prefix."""

    def make(name: str, documents: Sequence[Any], info: dict[str, Any] | None = None) -> str:
        prefix = tmp_path / name
        with IndexedDatasetWriter(prefix, np.int32, info) as writer:
            for document in documents:
                writer.add_document(document)
        return str(prefix)

    return make
