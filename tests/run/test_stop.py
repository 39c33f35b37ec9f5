"""SIGTERM and Ctrl-C lead to an orderly end from the first second of the process until its last."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.checkpoint import manifest
from moba_train.checkpoint.manifest import read_meta
from moba_train.errors import LAUNCHER_FOLDER
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.reports import RunReports
from moba_train.run.stop import (
    DUPLICATE_S,
    ENDED_BY_INTERRUPT,
    SIGNALS,
    STOPPED,
    STOPPED_CODE,
    StopRequest,
)
from moba_train.run.trainer import Trainer
from moba_train.train import main
from tests.forked import forked
from tests.run.tiny_run import Run

MOMENTS: dict[str, tuple[type | Any, str]] = {
    "building the model": (torch, "manual_seed"),
    "loading": (RunCheckpoints, "start"),
    "entering a stage": (Trainer, "_enter"),
    "the first step": (Trainer, "_forward_and_backward"),
    "between steps": (RunReports, "stop_time"),
    "the last save": (manifest, "hash_file"),
}
"""Where the process waits until the signal has been sent."""


def train_and_wait(recipe: str, moment: str, output: str, wait: Any) -> None:
    """Train, and at `moment` raise the flag and wait for half a second. What is printed goes to the file `output`, what
    the launcher is told into its folder."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[LAUNCHER_FOLDER] = os.path.dirname(output)
    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    owner, name = MOMENTS[moment]
    original = getattr(owner, name)

    def waiting(*arguments: Any, **named: Any) -> Any:
        if not wait.is_set():
            wait.set()
            time.sleep(0.5)
        return original(*arguments, **named)

    setattr(owner, name, waiting)
    sys.exit(main([recipe]))


def stopped(run: Run, moment: str, number: signal.Signals) -> tuple[int | None, str]:
    """Exit code and output of a run that gets the signal at this moment."""
    output = run.folder / "output"
    wait = forked().Event()
    process: BaseProcess = forked().Process(
        target=train_and_wait, args=(str(run.write_recipe()), moment, str(output), wait)
    )
    process.start()
    assert wait.wait(60)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    return process.exitcode, output.read_text()


@pytest.mark.parametrize(
    ("moment", "number", "saved"),
    [
        ("building the model", signal.SIGINT, None),
        ("loading", signal.SIGTERM, None),
        ("entering a stage", signal.SIGINT, None),
        ("the first step", signal.SIGINT, 1),
        ("between steps", signal.SIGTERM, 1),
        ("the last save", signal.SIGINT, 12),
    ],
)
def test_a_signal_ends_the_run_in_order_and_saves_what_was_trained(
    run: Run, moment: str, number: signal.Signals, saved: int | None
) -> None:
    """No evaluation runs beside the last save, which the signal would end."""
    run.recipe["checkpoint"]["every"] = 100
    del run.recipe["data"]["validation"], run.recipe["evaluation"]
    code, output = stopped(run, moment, number)
    assert code == 0, output
    assert "Traceback" not in output
    folder = run.run_dir / "checkpoints"
    found = [read_meta(path)["progress"]["step"] for path in folder.glob("step_*")] if folder.exists() else []
    assert found == [step for step in [saved] if step is not None]
    assert not list(folder.glob(".tmp-*"))
    assert ("stopped as asked" in output or "stopped before training began" in output) == (saved != 12)
    assert (run.folder / STOPPED).exists() == (saved != 12)


def test_a_run_without_checkpoints_does_not_promise_one_when_it_stops(run: Run) -> None:
    run.recipe["checkpoint"]["every"] = None
    code, output = stopped(run, "the first step", signal.SIGTERM)
    assert code == 0, output
    assert "SIGTERM: stopping after this step, without a checkpoint, as checkpoint.every is null\n" in output


def after_the_start(seconds: float, number: signal.Signals, command: list[str]) -> tuple[int, str]:
    """Exit code and output of a program that gets a signal so long after its start."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", STOPPED_CODE: "143"},
    )
    deadline = time.monotonic() + 30
    status = Path(f"/proc/{process.pid}/status")
    while not _catches(status, number):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    time.sleep(seconds)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def _catches(status: Path, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal; Python itself has one for SIGINT."""
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("SigCgt:")]
    caught = int(line.split()[1], 16)
    return all(caught >> (each - 1) & 1 for each in (number, signal.SIGTERM))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        (signal.SIGTERM, 0.0),
        (signal.SIGINT, 0.4),
    ],
)
def test_a_signal_while_torch_is_imported_ends_the_process_at_once(
    run: Run, number: signal.Signals, seconds: float
) -> None:
    command = ["moba_train.train", str(run.write_recipe())]
    assert after_the_start(seconds, number, command) == (0, "[rank 0] stopped before training began\n")
    assert not run.run_dir.exists()


Signals = list[tuple[signal.Signals, float]]


@pytest.mark.parametrize(
    ("signals", "under_torchrun", "ended"),
    [
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.1)], True, None),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.1), (signal.SIGINT, 5.0)], True, ENDED_BY_INTERRUPT),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, DUPLICATE_S + 0.1)], False, ENDED_BY_INTERRUPT),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 5.0)], True, ENDED_BY_INTERRUPT),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 5.0)], False, None),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 5.0), (signal.SIGTERM, 9.0)], True, None),
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 5.0)], True, None),
        ([(signal.SIGINT, 0.0), (signal.SIGHUP, 5.0)], True, None),
    ],
)
def test_the_second_ctrl_c_ends_at_once_but_not_a_duplicate_of_the_first(
    signals: Signals, under_torchrun: bool, ended: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    request = StopRequest()
    request.joined()
    codes = [request.receive(number, 100.0 + at) for number, at in signals]
    assert request.requested
    assert codes == [None] * (len(signals) - 1) + [ended]


def test_the_second_ctrl_c_ends_a_process_that_waits_for_ever(tmp_path: Path) -> None:
    """Its main thread never returns to Python, as inside a collective."""
    program = tmp_path / "program.py"
    program.write_text(
        "from moba_train.run import stop\n"
        "import ctypes, os, time\n"
        "stop.DUPLICATE_S = 0.2\n"
        "stop.listen().joined()\n"
        "forked, forking = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0: os.write(forking, b'x'); time.sleep(20); os._exit(0)\n"
        "os.read(forked, 1)\n"
        "os.kill(child, 15)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -15, 'a child must not handle signals for us'\n"
        "print('ready', flush=True)\n"
        "mutex = ctypes.create_string_buffer(64)\n"
        "for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(mutex)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == ENDED_BY_INTERRUPT


def test_training_in_this_process_leaves_its_handlers_as_they_were(run: Run) -> None:
    before: list[Callable[..., Any] | int | None] = [signal.getsignal(each) for each in SIGNALS]
    signal.set_wakeup_fd(-1)  # an event loop of another test may have left one
    assert run.train_here("--stop-at-step", "1") == 0
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
