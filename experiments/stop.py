"""Ctrl-C and SIGTERM in a call: no arm begins any more, those that run are ended, and the call ends in order, with the
results of the arms that were finished. The same command goes on."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.trainer_run import ranks_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ASKED = threading.Event()
LOOK_S = 0.5
"""Seconds between looks at whether an end is asked for."""
_PATIENCE_S = 30.0
"""Seconds that a process may take to end by itself: one that is killed while its GPU is shared may disturb others."""


class StoppedError(Exception):
    """An arm was ended because the call was asked to end."""


def is_asked() -> bool:
    """Whether the call is asked to end."""
    return _ASKED.is_set()


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, the first Ctrl-C or SIGTERM asks the call to end; a second one has its usual effect."""
    before: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        _ASKED.set()
        # Not print, which the signal may have interrupted.
        os.write(2, f"{signal.Signals(number).name}: the arms that run are ended, none begins\n".encode())

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    before |= {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield
    finally:
        restore()
        _ASKED.clear()


def run_to_end(command: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a command, its output added to `log`. Returns its exit status.

    Raises StoppedError when the call is asked to end; the process has ended then. So it does where the process ended at
    the same time: Ctrl-C reaches it as well.
    """
    with log.open("a") as stream:
        process = subprocess.Popen(command, env=dict(environment), stdout=stream, stderr=subprocess.STDOUT)
        while not is_asked() and process.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_S)
        if is_asked():
            _end(process)
            raise StoppedError(f"ended before it was finished; {log.name} has what it printed")
        return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PATIENCE_S)
        return
    for one in (*ranks_of(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    process.wait()
