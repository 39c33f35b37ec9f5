"""`python -m PROGRAM ...` as a fork of the process that has imported torch and the trainer, and the ranks that torchrun
starts in it as forks of that. Signals, process groups, exit codes, environments and output are those of real
processes: what is spared are the imports, six seconds of processor time in each."""

import faulthandler
import gc
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.forked import GARBAGE_SEARCHES, forked

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun handles: between fork and exec, a rank would handle them as its launcher does."""


class ForkedProgram:
    """A running `python *arguments` with the environment of this process and `more`, on the CPU.

    It offers what the tests use of `subprocess.Popen`. What it prints goes to the file `output`, its errors to the file
    `errors` if there is one, and the file `given` is its input. Without `output` it has no standard streams at all.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path | None,
        errors: Path | None = None,
        given: Path = Path(os.devnull),
        /,
        **more: str,
    ) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
        self._output = output
        streams = (given, output, errors or output) if output else ()
        self._process = forked().Process(target=_start, args=([*arguments], environment, Path.cwd(), streams))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative where a signal ended it; None before."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode`."""
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.join()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """All that it has printed, once it has ended. Kills it and fails after `timeout` seconds."""
        self._process.join(timeout)
        output = self._output.read_text() if self._output else ""
        if self.poll() is None:
            self.kill()
            raise AssertionError(f"it has not ended in {timeout} s: {output[-5000:]}")
        return output, None


def run_forked(command: Sequence[str], **_how: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a command that begins with this Python, whose streams are one: stdout."""
    with tempfile.TemporaryDirectory() as folder:
        program = ForkedProgram(command[1:], Path(folder) / "output")
        output, _ = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess([*command], program.returncode, output)


class ForkedRank:
    """The process of a rank, with what torchrun asks of it."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_rank, args=(command, environment))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        os.setpgid(self.pid, self.pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)


def _start(arguments: list[str], environment: dict[str, str], folder: Path, streams: tuple[Path, ...]) -> None:
    os.chdir(folder)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
    if streams:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing has given it another file
        faulthandler.enable()
    else:
        _close_streams()
    handler: Any = SubprocessHandler
    handler._popen = lambda _handler, command, environment: ForkedRank(command, environment)
    system: Any = os
    system.execv = _exec
    _become(arguments, environment)


def _exec(_program: str, command: list[str]) -> None:
    _become(command[1:], dict(os.environ))
    sys.exit()


def _rank(command: Sequence[str], environment: dict[str, str]) -> None:
    """Begin with the signal handlers and the streams of a new process."""
    if sys.stdout is None:
        _close_streams()
    else:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # as in `_start`
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _become([*command[1:]], environment)


def _close_streams() -> None:
    """Be as Python is where it begins without them: what it opened under their numbers is not passed on."""
    os.closerange(0, 3)
    for name in ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__"):
        setattr(sys, name, None)


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    """Run as `python *arguments` would."""
    gc.freeze()
    gc.set_threshold(*GARBAGE_SEARCHES)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout, sys.stderr = (getattr(stream, "stream", stream) for stream in (sys.stdout, sys.stderr))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    program, *rest = [argument for argument in arguments if argument != "-u"]
    if program == "-m":
        module, *rest = rest
        spec = find_spec(module)
        assert spec is not None
        program = str(spec.origin)
    sys.argv = [program, *rest]
    runpy.run_path(program, run_name="__main__")
