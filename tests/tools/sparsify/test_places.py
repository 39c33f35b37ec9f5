"""Steps of `moba-train sparsify` side by side: what waits for what, a step that fails, and processes with GPUs of their
own."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import torch

from benchmarks.trainer_run import is_running
from moba_train.errors import UserError
from moba_train.output_files import write_atomically
from moba_train.tools.sparsify import recipes, steps
from moba_train.tools.sparsify.places import Place, places
from moba_train.tools.sparsify.steps import SECONDS, Step, run_steps
from tests.forked import forked


@pytest.fixture
def threads() -> Iterator[list[Place]]:
    """Places that are threads of this process."""

    def place(pool: ThreadPoolExecutor) -> Place:
        return lambda run, words, _: pool.submit(run, words)

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        yield [place(one), place(other)]


def step(folder: Path, name: str, *needs: str) -> Step:
    return Step(name, ["eval", name], folder / name, frozenset(needs))


def test_steps_that_need_nothing_of_each_other_run_at_the_same_time(tmp_path: Path, threads: list[Place]) -> None:
    together = Barrier(2, timeout=60)
    ended: list[str] = []

    def run(words: Sequence[str]) -> int:
        if words[1] in ("oracle", "calibrate"):
            together.wait()
        (tmp_path / words[1]).touch()
        ended.append(words[1])
        return 0

    (tmp_path / "before").touch()
    todo = [step(tmp_path, "before"), step(tmp_path, "extend", "before"), step(tmp_path, "oracle", "extend")]
    todo += [
        step(tmp_path, "calibrate", "extend"),
        step(tmp_path, "sparse", "calibrate"),
        step(tmp_path, "export", "sparse"),
    ]
    said: list[str] = []
    run_steps(todo, {}, tmp_path, run, said.append, threads)
    assert ended[0] == "extend"
    assert ended.index("calibrate") < ended.index("sparse") < ended.index("export")
    assert said[0] == "[1/6] before: done before"
    assert json.loads((tmp_path / SECONDS).read_text()).keys() == {*ended}


def test_after_a_failure_what_runs_ends_and_nothing_begins(
    tmp_path: Path, threads: list[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    second = Event()
    wait = steps.wait

    def counted(*arguments: Any, **options: Any) -> Any:
        waits.append(len(waits))
        if len(waits) == 2:  # the failure has been seen
            second.set()
        return wait(*arguments, **options)

    def run(words: Sequence[str]) -> int:
        if words[1] == "fails":
            return 9
        assert second.wait(60)
        (tmp_path / words[1]).touch()
        return 0

    monkeypatch.setattr(steps, "wait", counted)
    todo = [step(tmp_path, "fails"), step(tmp_path, "works"), step(tmp_path, "later"), step(tmp_path, "last", "works")]
    with pytest.raises(UserError, match="the step 'fails' ended with status 9; the same command goes on with it"):
        run_steps(todo, {}, tmp_path, run, print, threads)
    assert (tmp_path / "works").exists()
    assert not (tmp_path / "later").exists()
    assert not (tmp_path / "last").exists()


def test_an_export_whose_process_was_killed_is_a_failure(tmp_path: Path) -> None:
    """Unlike one that says that no export can hold the model."""

    future: Future[int] = Future()
    future.set_exception(BrokenExecutor())
    with pytest.raises(UserError, match="the step 'export' was killed"):
        run_steps([step(tmp_path, "export")], {}, tmp_path, subprocess.call, print, [lambda *_: future])


def test_recipes_without_guesses_stay_as_they_are(tmp_path: Path) -> None:
    """As of a further seed that is trained with its ablations."""
    recipe = tmp_path / "recipes" / recipes.CALIBRATED
    recipe.parent.mkdir()
    recipe.write_text("measured\n")
    todo = [Step("train sparse 2", ["train", "sparse.yaml"], tmp_path / "runs" / "sparse-2")]
    with pytest.raises(UserError, match="the step 'train sparse 2' ended with status 9"):
        run_steps(todo, {}, tmp_path, lambda words: 9, print)
    assert recipe.read_text() == "measured\n"


def test_processes_have_gpus_of_their_own_and_write_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes identifiers for numbers, and leaves out those from the first one that it does not know."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-4,GPU-5,6,7,-1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("moba_train.tools.sparsify.places.get_context", lambda _: forked())
    words = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; echo problem >&2; exit 3"]
    logs = [tmp_path / "logs" / f"{number}.txt" for number in range(2)]
    with places(2, 2) as found:
        started = [place(subprocess.call, words, log) for place, log in zip(found, logs, strict=True)]
        assert [future.result() for future in started] == [3, 3]
        assert found[0](fail, words, logs[0]).result() == 1
    first, second = (log.read_text() for log in logs)
    assert first.startswith("GPU-4,GPU-5\nproblem\nTraceback")
    assert first.endswith("SystemExit: a bug\n")
    assert second == "6,7\nproblem\n"
    with pytest.raises(UserError, match="given 5 and 1; allowed: at most 4 GPUs together"), places(5, 1):
        pass


def fail(_words: Sequence[str]) -> int:
    """An exception that would end a process if it were sent there."""
    raise SystemExit("a bug")


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    parent = forked().Process(target=sleep_beside, args=(tmp_path / "pid",))
    parent.start()
    wait_until(lambda: (tmp_path / "pid").exists())
    child = int((tmp_path / "pid").read_text())
    assert is_running(child)
    parent.kill()
    wait_until(lambda: not is_running(child))


def sleep_beside(file: Path) -> None:
    with places(2, 1) as found:
        found[0](say_and_sleep, [str(file)], file.with_name("log")).result()


def say_and_sleep(words: Sequence[str]) -> int:
    write_atomically(Path(words[0]), str(os.getpid()))
    time.sleep(600)
    return 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300  # of a machine that is busy
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
