"""What the tests of training share."""

from pathlib import Path

import pytest

from tests.run.faults import FAULTS, POISONED, STEPS, inject, steady
from tests.run.tiny_run import Run


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> tuple[Run, list[tuple[int, bool]]]:
    """A run that skips four faulty steps, and which of its steps changed weights or optimizer. Not to be changed."""
    run = steady(Run(tmp_path_factory.mktemp("skipping"), corpora), "skip_step", STEPS)
    with pytest.MonkeyPatch.context() as patch:
        changed = inject(patch, FAULTS, (POISONED,))
        assert run.train_here() == 0
    return run, changed
