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
def finished_run(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """One undisturbed run on two ranks, to compare others with. Not to be changed."""
    undisturbed = Run(tmp_path_factory.mktemp("finished"), corpora)
    code, output = undisturbed.train(2)
    assert code == 0, output
    return undisturbed


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes that all tests share, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        processes = Ranks()
        processes.start(4)
    yield processes
    processes.close()
