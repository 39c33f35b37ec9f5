"""Runs and corpora for the training tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import FAULTS, POISONED, STEPS, inject, steady
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


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> tuple[Run, list[tuple[int, bool]]]:
    """A run that skips four faulty steps, and which of its steps changed weights or optimizer. Not to be changed."""
    run = steady(Run(tmp_path_factory.mktemp("skipping"), corpora), "skip_step", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        changed = inject(patch, FAULTS, (POISONED,))
        assert run.train_here() == 0
    return run, changed
