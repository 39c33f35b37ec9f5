"""Runs and corpora for the training tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import Run, write_corpus
from trainer_ranks import Ranks


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for index, name in enumerate(("one", "two", "valid")):
        write_corpus(folder / name, 60, index)
    return folder


@pytest.fixture
def run(tmp_path: Path, corpora: Path) -> Run:
    return Run(tmp_path, corpora)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """One undisturbed run on two ranks, to compare others with. Not to be changed."""
    undisturbed = Run(tmp_path_factory.mktemp("finished"), corpora)
    undisturbed.recipe["telemetry"]["plots"] = True
    ranks.train(undisturbed, 2)
    return undisturbed


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that all tests share, on the CPU."""
    processes = Ranks()
    yield processes
    processes.close()
