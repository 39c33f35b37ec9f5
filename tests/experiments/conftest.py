"""What the tests of figures share: the real trainer in this process, without the seconds that every start takes."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

from experiments import run_arm, schedule
from moba_train.tools.cli import app
from moba_train.train import main as train
from tests.commands import run_app

T = TypeVar("T")


class Inline:
    """A pool of one: signals, which the trainer listens to, reach the main thread alone."""

    def __init__(self, workers: int) -> None:
        assert workers == 1

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        future: Future[T] = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


def start_here(command: list[str], environment: Mapping[str, str], log: Path) -> None:
    """Train or evaluate in this process."""
    if "moba_train.train" in command:
        assert train([command[command.index("moba_train.train") + 1]]) == 0
    else:
        run_app(app, *command[command.index("moba_train.tools.cli") + 1 :])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working folder in which arms run in this process."""
    monkeypatch.setattr(run_arm, "start", start_here)
    monkeypatch.setattr(schedule, "ThreadPoolExecutor", Inline)
    monkeypatch.chdir(tmp_path)
    return tmp_path
