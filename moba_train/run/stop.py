"""SIGTERM, SIGHUP and Ctrl-C, from the first second of the process to its last: requests for an orderly stop.

Imports nothing heavy, because it listens while torch is imported. A thread of its own receives the signals, through
Python's wakeup descriptor: a handler in the main thread would not run while that thread waits inside a collective or
for torchrun's store. What a signal does depends on the moment:

    before the rank has joined the others   there is nothing to save. A rank that is alone ends at once, with code 0.
                                            Others end together when all have joined, at the latest 10 s after the
                                            signal: it may have reached one rank only, and the others wait for that one
    afterwards                              the request is noted; all ranks agree on it between the phases of set-up and
                                            before each step, save if a step was made, and end with code 0
    during the last save and afterwards     noted: the save is completed, and the process ends as it would have
    after another rank has failed           torchrun clears its ranks away, which asks for nothing: a rank that has
                                            joined ends by the error that it waits for, another one after 10 s

A second Ctrl-C ends the process at once with code 130. Duplicates of the first do not count: where ranks share the
terminal with torchrun, they receive Ctrl-C from the terminal and once more from torchrun, moments later. torchrun
itself passes the first Ctrl-C on as SIGINT and a second one as SIGTERM, so under torchrun a SIGTERM after a SIGINT
counts as the second. A SIGTERM after a SIGTERM never does: schedulers repeat it. SIGHUP, which a terminal sends when it
closes, counts as SIGTERM does, unless the process was started to ignore it, as nohup does.

`StopTime` measures how long an orderly stop takes. A signal may come right after a step has begun, while the checkpoint
before is still being written. The stop then takes the rest of that step, the rest of that save, the last save, and some
seconds to close logs. The launcher gives its ranks several times as long before it kills them (`limit_s`); schedulers
need the number from the user, so the run reports it.
"""

import atexit
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from moba_train.errors import LAUNCHER_FOLDER
from moba_train.output_files import write_atomically

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

DUPLICATE_S = 2.0
"""Seconds in which a signal after SIGINT is a duplicate of it: torchrun passes one on within a tenth of a second, on an
overloaded machine a second; a person who reads the message takes longer."""

JOINS_WITHIN_S = 10.0
"""Seconds after which a rank that was asked to stop no longer waits to join the others: schedulers give about 30."""

ENDED_BY_INTERRUPT = 128 + signal.SIGINT

STDERR = 2

STOPPED = "stopped"
"""File in `LAUNCHER_FOLDER` by which the first rank of each node says that the run ends because it was asked to: the
exit code, 0, does not tell this from a run that is complete."""

LEFT_BEHIND = "left_behind"
"""File by which the launcher says that a rank has failed, before torchrun sends SIGTERM to the others."""

STOPPED_CODE = "MOBA_TRAIN_STOPPED_CODE"
"""Environment variable: exit code of a run that was stopped as asked, 0 by default. Kubernetes needs another one: it
takes pods that it has stopped itself and that end with 0 for complete."""

STOP_LIMIT = "stop_limit"
"""File by which the first rank of each node gives the seconds that the ranks may take to stop."""

BEFORE_TRAINING = "stopped before training began"


class StoppedBeforeTrainingError(Exception):
    """The run was asked to stop while it was set up. Not an error of anyone's: the process ends with code 0."""


class StopRequest:
    """Request that this process stop, and the process's state on which the answer depends."""

    def __init__(self, stopped_code: int = 0) -> None:
        """`stopped_code`: exit code of a process that is alone and asked to stop before it trains."""
        self.training = False
        """True once nothing but steps is left: an end of the process is then no longer one of the set-up."""
        self.takes_s: int | None = None
        """Seconds that an orderly stop takes at most, once known."""
        self.saves = True
        """True if the run saves checkpoints."""
        self._stopped_code = stopped_code
        self._asked = threading.Event()
        self._joined = False
        self._failed = False
        self._interrupted: float | None = None
        self._lock = threading.Lock()

    @property
    def requested(self) -> bool:
        """True if a signal has asked for the end."""
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for a request, at most `seconds`; True if there is one."""
        return self._asked.wait(seconds)

    def joined(self) -> None:
        """Declares that the other ranks depend on this one from now on, so that requests are only noted."""
        with self._lock:
            self._joined = True

    def failed(self) -> None:
        """An error ends the run: torchrun now sends SIGTERM to all ranks, which asks for nothing."""
        with self._lock:
            self._failed = True

    def receive(self, number: int, now: float) -> int | None:
        """Take the signal `number`, received at `now` (monotonic seconds). The code with which the process must end at
        once, or None."""
        with self._lock:
            passed_on = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
            insists = number == signal.SIGINT or passed_on
            if insists and self._interrupted is not None and now - self._interrupted > DUPLICATE_S:
                _say("asked again: ending at once; steps since the last checkpoint are lost", of_every_rank=True)
                return ENDED_BY_INTERRUPT
            if number == signal.SIGINT and self._interrupted is None:
                self._interrupted = now
            if number != signal.SIGINT and _left_behind():
                self._failed = True
            first = not self.requested
            if not self._failed:
                self._asked.set()
            if not self._joined and int(os.environ.get("WORLD_SIZE", "1")) == 1:
                _say(BEFORE_TRAINING)
                report_stopped()
                return self._stopped_code
            if first and not self._joined:
                # The signal may have reached this rank alone, and the others wait for it in the rendezvous.
                timer = threading.Timer(JOINS_WITHIN_S, self._end_unless_joined)
                timer.daemon = True
                timer.start()
            elif first and not self._failed:
                _say(f"{signal.Signals(number).name}: {self._what_follows(number)}")
        return None

    def _what_follows(self, number: int) -> str:
        if not self.training:
            return "stopping before training begins"
        saved = "with a checkpoint" if self.saves else "without a checkpoint, as checkpoint.every is null"
        within = f", within {self.takes_s} s" if self.takes_s is not None else ""
        again = "; Ctrl-C again ends at once, without saving" if number == signal.SIGINT else ""
        return f"stopping after this step, {saved}{within}{again}"

    def _end_unless_joined(self) -> None:
        with self._lock:
            if not self._joined:
                if self.requested:
                    _say(BEFORE_TRAINING)
                    report_stopped()
                # The main thread may be inside torchrun's rendezvous, which no exception reaches.
                os._exit(0)


def signals_to_handle() -> list[signal.Signals]:
    """`SIGNALS`, without SIGHUP where this process was started to ignore it, as nohup does."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


class _Listener:
    """Receives the signals of this process in a thread, and hands them to `request`."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self._process = os.getpid()
        self._read_end, self._write_end = os.pipe()
        # Python's signal handler writes into it and must never block.
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._work, name="stop", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._noted) for number in signals_to_handle()
        }

    def close(self) -> None:
        """Give back what was there before."""
        self._restore()
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)

    def forget_in_child(self) -> None:
        """Stops listening in a process that was just forked, which must neither survive a signal nor report it to its
        parent."""
        if os.getpid() != self._process:
            self._process = os.getpid()
            self._restore()

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._noted:
                signal.signal(number, handler)

    def _noted(self, _number: int, _frame: FrameType | None) -> None:
        """Python's part of the handler; the number is in the pipe already."""

    def _work(self) -> None:
        while received := os.read(self._read_end, 1):
            number = received[0]
            if number in SIGNALS and signal.getsignal(number) == self._noted:
                code = self.request.receive(number, time.monotonic())
                if code is not None:
                    os._exit(code)  # the main thread may be inside a call that never returns


_listener: _Listener | None = None


def listen(stopped_code: int = 0) -> StopRequest:
    """Listen from now on and until the process has ended. Called first thing in a program, in its main thread.

    `stopped_code`: exit code of a process that is alone and asked to stop before it trains."""
    global _listener
    _listener = _Listener(StopRequest(stopped_code))
    os.register_at_fork(after_in_child=_listener.forget_in_child)
    atexit.register(_ignore_signals)  # runs after all other exit functions
    return _listener.request


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Listen inside the context, unless the process listens already."""
    global _listener
    if _listener is not None:
        yield _listener.request
        return
    _listener = _Listener(StopRequest())
    try:
        yield _listener.request
    finally:
        _listener.close()
        _listener = None


def report_stopped() -> None:
    """Tell the launcher, if it wants to know, that the run ends because it was asked to."""
    _tell_launcher(STOPPED, "")


def allow_to_stop(seconds: float) -> None:
    """Tell the launcher, if it wants to know, how long the ranks may take to stop before it kills them."""
    _tell_launcher(STOP_LIMIT, str(seconds))


def _tell_launcher(name: str, content: str) -> None:
    """Replace a file of the launcher's folder, if there is one; a signal may come while it is written."""
    if LAUNCHER_FOLDER in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):
            write_atomically(Path(os.environ[LAUNCHER_FOLDER], name), content)


def _left_behind() -> bool:
    """True if the launcher says that another rank has failed."""
    return LAUNCHER_FOLDER in os.environ and os.path.exists(os.path.join(os.environ[LAUNCHER_FOLDER], LEFT_BEHIND))


def _ignore_signals() -> None:
    """Ignores signals from here to the end: Python would put back the system's handlers as it ends, and a signal would
    then change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str, of_every_rank: bool = False) -> None:
    """Tell the user, once and not from every rank. Not by `print`: the main thread may hold the stream's lock."""
    rank = os.environ.get("RANK", "0")
    if of_every_rank or rank == "0":
        with suppress(OSError):
            os.write(STDERR, f"[rank {rank}] {text}\n".encode())


CLOSING_S = 30
"""Plots, and at most 30 s that wandb is waited for (tools/sinks/wandb.py)."""
ROUNDED_TO_S = 30
SAFETY = 3
"""The launcher kills ranks that take this many times as long as measured. When a whole cluster is told to stop, all
runs save at once; and killing one too early loses its work, while killing a hanging one late loses nothing."""
AFTER_TIMEOUT_S = 60
"""A run whose ranks hang ends by itself when `parallel.timeout` is over, and reports which rank it was; it is not
killed before."""
UNMEASURED_S = 3600
"""The launcher's limit until a step of the stage and a save are measured: a first step may compile for minutes."""


class StopTime:
    """The longest step of the current stage, the longest batch of its evaluations, and the longest save so far."""

    def __init__(self, request: StopRequest, timeout_s: float) -> None:
        """`request` and the launcher are told; `timeout_s`: limit of the collectives."""
        self._request = request
        self._timeout_s = timeout_s
        self._step_s: float | None = None
        self._first = True
        self._save_s: float | None = None
        self._reported = 0
        self._tell()

    def begin_stage(self) -> None:
        """Forget the steps: those of another stage take another time."""
        self._step_s = None
        self._first = True
        self._reported = 0
        self._tell()

    def step_took(self, seconds: float) -> None:
        """Record a step; the first one of a stage does not count, because it may have compiled."""
        if not self._first:
            self._step_s = max(seconds, self._step_s or 0.0)
        self._first = False

    def batch_took(self, seconds: float) -> None:
        """Record the batch of an evaluation, which must end before the run can stop, as a step must."""
        if self._step_s is not None:
            self._step_s = max(seconds, self._step_s)

    def save_took(self, seconds: float) -> None:
        """Record a save."""
        self._save_s = max(seconds, self._save_s or 0.0)

    @property
    def seconds(self) -> int | None:
        """Seconds that an orderly stop takes at most, rounded up; None until a step and a save are measured."""
        if self._step_s is None or self._save_s is None:
            return None
        # Two saves: the one under way, and the last one.
        return math.ceil((self._step_s + 2 * self._save_s + CLOSING_S) / ROUNDED_TO_S) * ROUNDED_TO_S

    @property
    def limit_s(self) -> float:
        """Seconds after which ranks that were told to stop may be killed."""
        if self.seconds is None:
            return UNMEASURED_S
        return max(SAFETY * self.seconds, self._timeout_s + AFTER_TIMEOUT_S)

    def news(self) -> str | None:
        """The time in words where it is known and has become longer since the last call, or in another stage."""
        if self.seconds is None or self.seconds <= self._reported:
            return None
        self._reported = self.seconds
        self._tell()
        return (
            f"an orderly stop takes up to {self.seconds} s (a step {self._step_s:.1f} s, a save {self._save_s:.1f} s); "
            f"a scheduler must wait as long between SIGTERM and SIGKILL (Slurm: --signal=B:USR1@{self.seconds})"
        )

    def _tell(self) -> None:
        self._request.takes_s = self.seconds
        allow_to_stop(self.limit_s)


class RunStop:
    """The end of a run before its last step: asked for by a signal or `--stop-at-step`, and the time that it takes."""

    def __init__(self, request: StopRequest, at_step: int | None, timeout_s: float) -> None:
        """at_step: steps of the whole run after which it stops; None: only when asked. timeout_s: of collectives."""
        self.request = request
        self.time = StopTime(request, timeout_s)
        self._at_step = at_step

    def is_due(self, step: int) -> bool:
        """True if the run is to stop after `step` steps, as far as this rank knows."""
        return self.request.requested or (self._at_step is not None and step >= self._at_step)
