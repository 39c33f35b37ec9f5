"""Shared by the checkpoint tests: failing reads are tried again at once."""

import pytest

from moba_train.checkpoint import files


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_DELAYS_S", (0.0,) * len(files.RETRY_DELAYS_S))
