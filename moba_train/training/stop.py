"""SIGTERM and Ctrl-C, from the first second of the process to its last: requests for an orderly stop.

Imports nothing heavy, because it listens while torch is imported. A thread of its own receives the signals, through
Python's wakeup descriptor: a handler in the main thread would not run while that thread waits inside a collective or
for torchrun's store. What a signal does depends on the moment:

    before the rank has joined the others   there is nothing to save. A rank that is alone ends at once, with code 0.
                                            Others end together when all have joined, at the latest 10 s after the
                                            signal: it may have reached one rank only, and the others wait for that one
    afterwards                              the request is noted; all ranks agree on it between the phases of set-up and
                                            before each step, save if a step was made, and end with code 0
    during the last save and afterwards     noted: the save is completed, and the process ends as it would have

A second Ctrl-C ends the process at once with code 130. Duplicates of the first do not count: where ranks share the
terminal with torchrun, they receive Ctrl-C from the terminal and once more from torchrun, moments later. torchrun
itself passes the first Ctrl-C on as SIGINT and a second one as SIGTERM, so under torchrun a SIGTERM after a SIGINT
counts as the second. A SIGTERM after a SIGTERM never does: schedulers repeat it.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)

DUPLICATE_S = 2.0
"""Seconds in which a signal after SIGINT is a duplicate of it: torchrun passes one on within a tenth of a second, on an
overloaded machine a second; a person who reads the message takes longer."""

JOINS_WITHIN_S = 10.0
"""Seconds after which a rank that was asked to stop no longer waits to join the others: schedulers give about 30."""

ENDED_BY_INTERRUPT = 128 + signal.SIGINT

STDERR = 2

LAUNCHER_FOLDER = "MOBA_TRAIN_LAUNCHER_FOLDER"
"""Environment variable: folder of the launcher, where the first rank of each node leaves the files below."""

STOPPED = "stopped"
"""File that says that the ranks end as asked: torchrun does not say how they do."""

INTERRUPTED = "interrupted"
"""File that says that the ranks end at once, because they were asked a second time."""

STOPPED_CODE = "MOBA_TRAIN_STOPPED_CODE"
"""Environment variable: exit code of a run that was stopped as asked, 0 by default. Kubernetes needs another one: it
takes pods that it has stopped itself and that end with 0 for complete."""

STOP_LIMIT = "stop_limit"
"""File with the seconds that the ranks may take to stop."""

BEFORE_TRAINING = "stopped before training began"


class StoppedBeforeTrainingError(Exception):
    """The run was asked to stop while it was set up. Not an error of anyone's: the process ends with code 0."""


class StopRequest:
    """Whether this process is asked to stop."""

    def __init__(self) -> None:
        self.training = False
        """Whether steps are made: what ends the process is no longer part of the set-up."""
        self.takes_s: int | None = None
        """Seconds that an orderly stop takes at most, once known."""
        self._asked = threading.Event()
        self._joined = False
        self._silent = False
        self._interrupted: float | None = None
        self._lock = threading.Lock()

    @property
    def requested(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._asked.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for a request, at most `seconds`; whether there is one."""
        return self._asked.wait(seconds)

    def joined(self) -> None:
        """From now on the other ranks depend on this one, and requests are only noted."""
        with self._lock:
            self._joined = True

    def ended(self) -> None:
        """An error ends the run: torchrun now sends SIGTERM to all ranks, which asks for nothing."""
        with self._lock:
            self._silent = True

    def receive(self, number: int, now: float) -> int | None:
        """Take the signal `number`, received at `now` (monotonic seconds). The code with which the process must end at
        once, or None."""
        with self._lock:
            insists = number == signal.SIGINT or "TORCHELASTIC_RUN_ID" in os.environ
            if insists and self._interrupted is not None and now - self._interrupted > DUPLICATE_S:
                _say("asked again: ending at once; steps since the last checkpoint are lost", of_every_rank=True)
                return ENDED_BY_INTERRUPT
            if number == signal.SIGINT and self._interrupted is None:
                self._interrupted = now
            first = not self.requested
            self._asked.set()
            if not self._joined and int(os.environ.get("WORLD_SIZE", "1")) == 1:
                _say(BEFORE_TRAINING)
                return 0
            if first and not self._joined:
                timer = threading.Timer(JOINS_WITHIN_S, self._end_unless_joined)
                timer.daemon = True
                timer.start()
            elif first and not self._silent:
                again = "; Ctrl-C again ends at once, without saving" if number == signal.SIGINT else ""
                within = f", within {self.takes_s} s" if self.takes_s is not None else ""
                _say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint{within}{again}")
        return None

    def _end_unless_joined(self) -> None:
        with self._lock:
            if not self._joined:
                _say(BEFORE_TRAINING)
                report_stopped()
                os._exit(0)


class _Listener:
    """Receives the signals of this process in a thread, and hands them to `request`."""

    def __init__(self, request: StopRequest) -> None:
        self.request = request
        self._process = os.getpid()
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._work, name="stop", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._noted) for number in SIGNALS}

    def close(self) -> None:
        """Give back what was there before."""
        self._restore()
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)

    def forget_in_child(self) -> None:
        """In a process that was just forked: it must neither survive a signal nor report it to its parent."""
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
                    _tell_launcher(STOPPED if code == 0 else INTERRUPTED, "")
                    os._exit(code)  # the main thread may be inside a call that never returns


_listener: _Listener | None = None


def listen() -> StopRequest:
    """Listen from now on and until the process has ended. Called first thing in a program, in its main thread."""
    global _listener
    _listener = _Listener(StopRequest())
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
    """Tell the program that has started the ranks, if it wants to know, that the run ends as asked."""
    _tell_launcher(STOPPED, "")


def allow_to_stop(seconds: float) -> None:
    """Tell the program that has started the ranks how long they may take to stop before it kills them."""
    _tell_launcher(STOP_LIMIT, str(seconds))


def _tell_launcher(name: str, content: str) -> None:
    """Replace a file of the launcher's folder, if there is one; a signal may come while it is written."""
    if LAUNCHER_FOLDER in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        path = os.path.join(os.environ[LAUNCHER_FOLDER], name)
        with suppress(OSError):
            descriptor = os.open(f"{path}.new", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.write(descriptor, content.encode())
            os.close(descriptor)
            os.replace(f"{path}.new", path)


def _ignore_signals() -> None:
    """When Python ends, it would put back the system's handlers, and a signal would then change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _say(text: str, of_every_rank: bool = False) -> None:
    """Tell the user, once and not from every rank. Not by `print`: the main thread may hold the stream's lock."""
    rank = os.environ.get("RANK", "0")
    if of_every_rank or rank == "0":
        with suppress(OSError):
            os.write(STDERR, f"[rank {rank}] {text}\n".encode())
