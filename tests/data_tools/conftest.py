"""An input folder and a tokenizer for the tests of moba-data."""

from pathlib import Path

import pytest

from data_tools.train_tokenizer import train_tokenizer
from tests.data_tools.prose import prose


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a sentencepiece model of 320 ids."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.txt").write_text(prose(0, 20_000))
    train_tokenizer([str(folder / "text.txt")], folder / "tok.model", 320, "text")
    return str(folder / "tok.model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for inputs."""
    (tmp_path / "input").mkdir()
    return tmp_path / "input"
