"""The project of the calls."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_tools.corpus_writer import IndexedDatasetWriter
from tests.tools.convert.hf_models import make_hf_model
from tests.tools.sparsify.tiny import LENGTH


@pytest.fixture(scope="module")
def project(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that was trained on half the length, its tokenizer and a corpus of long documents."""
    folder = tmp_path_factory.mktemp("sparsify")
    changes = {"vocab_size": 512, "rope_parameters": {"rope_theta": 1e4}, "max_position_embeddings": LENGTH // 2}
    make_hf_model("smollm2", folder / "hf", **changes)
    shutil.copy(texts / "tok.model", folder / "hf" / "tokenizer.model")
    for name, first, length in (("train", 0, LENGTH + 90), ("valid", 20, LENGTH + 90), ("short", 20, LENGTH)):
        with IndexedDatasetWriter(folder / name, np.uint16) as writer:
            for start in range(first, first + 4):
                writer.add_document(np.arange(start, length + start) % 300)
    return folder
