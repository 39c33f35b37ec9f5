"""What the tests of evaluations share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import questions

from moba_train.parallel.world import World, joined_world


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a corpus."""
    folder = tmp_path_factory.mktemp("texts")
    questions.write_data(folder)
    return folder


@pytest.fixture
def alone() -> Iterator[World]:
    """One rank."""
    with joined_world() as world:
        yield world
