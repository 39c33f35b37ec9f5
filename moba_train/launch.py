"""torchrun, with an orderly end at SIGTERM and Ctrl-C, and with the exit code of the ranks.

python -m moba_train.launch --nproc-per-node 8 -m moba_train.train RECIPE.yaml key.path=value ...

torchrun's own code is 1 whatever its ranks end with, and its report follows every error; here the report is left out
where a rank has said what is wrong. torchrun passes a signal on to its ranks, waits 30 s, kills those that are left,
and then raises an exception however they have ended. Here the first rank of each node leaves a file behind when it has
stopped as asked, and another one from which the launcher knows how long a stop may take: a step of a million tokens
alone takes minutes (training/stop_time.py).
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moba_train.error_output import OWN_CODES, REFUSED_FILE, print_error, quiet_torchrun
from moba_train.errors import BrokenNodeError, LaunchError, ReproducibleFaultError
from moba_train.training.stop import (
    ENDED_BY_INTERRUPT,
    INTERRUPTED,
    LAUNCHER_FOLDER,
    STOP_LIMIT,
    STOPPED,
    STOPPED_CODE,
    listen,
)

FAULTS = (BrokenNodeError.exit_code, ReproducibleFaultError.exit_code)
"""Exit codes that say why a run ended, whichever rank was the first to leave."""

LAST_CODE = 255
"""The highest exit code that a process can end with."""

SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torchrun's environment variable: seconds that ranks may take to stop. Where it is set, it wins over what they ask
for."""

LONGEST_STOP_S = 604_800
"""The most seconds, a week, that it may ask for."""

_KILLED = (
    "was killed by SIGKILL, as Linux and schedulers do when host memory has run out (dmesg or the job's log say so); "
    "on a CPU and with activation_offload a smaller stages[i].micro_batch_size needs less"
)
"""What is said of a rank that SIGKILL has ended, behind its name: it could not say why itself."""


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with these arguments; without `--nproc-per-node`, with a rank for each GPU of this machine.

    Returns 0 when training ended, `STOPPED_CODE` when it stopped as asked, 130 when a second Ctrl-C ended it at once,
    else the exit code of the ranks on this node that failed, and 128 + the signal where they did not stop in time. A
    `STOPPED_CODE` or `SHUTDOWN_TIMEOUT` that is none is refused.
    """
    try:
        stopped_code = _whole_number(STOPPED_CODE, 0, LAST_CODE, "an exit code")
        _whole_number(SHUTDOWN_TIMEOUT, 0, LONGEST_STOP_S, "seconds")
    except LaunchError as error:
        print_error(error)
        return error.exit_code
    listen()  # until torchrun handles signals itself, there is nothing to save
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, parse_args
    from torch.distributed.run import main as torchrun

    given = any(argument.startswith(("--nproc-per-node", "--nproc_per_node")) for argument in arguments)
    ranks = [] if given else ["--nproc-per-node", str(torch.cuda.device_count() or 1)]
    try:
        config_from_args(parse_args([*ranks, *arguments]))
    except ValueError as error:  # it would show as a traceback
        refusal = LaunchError(f"options of torchrun: {error}; --help lists them")
        print_error(refusal)
        return refusal.exit_code
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LAUNCHER_FOLDER] = folder
        os.environ[REFUSED_FILE] = str(Path(folder) / "refused")
        quiet_torchrun()
        try:
            with _patience(Path(folder)):
                torchrun([*ranks, *arguments])
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            code = _exit_code(error.failures.values(), first)
            if code not in OWN_CODES:  # else a rank has said why
                print(error, file=sys.stderr)
            if code == 128 + signal.SIGKILL:
                print(f"error: rank {rank} {_KILLED}", file=sys.stderr)
            return code
        except SignalException as error:
            if not (Path(folder) / STOPPED).exists():
                if (Path(folder) / INTERRUPTED).exists():  # the ranks have said so
                    return ENDED_BY_INTERRUPT
                name = error.sigval.name
                print(f"error: the ranks did not stop in time after {name} and were killed", file=sys.stderr)
                return 128 + error.sigval
        return stopped_code if (Path(folder) / STOPPED).exists() else 0


def _whole_number(variable: str, default: int, most: int, what: str) -> int:
    """The value of an environment variable. An empty one is taken out, because torchrun would fail on it.

    Raises LaunchError for any other text: it would show as a traceback, of a code only after the run has stopped.
    """
    text = os.environ.get(variable)
    if not text:
        os.environ.pop(variable, None)
        return default
    if not (text.isdecimal() and int(text) <= most):
        raise LaunchError(f"{variable}: given {text!r}; allowed: {what}, 0 to {most}")
    return int(text)


@contextmanager
def _patience(folder: Path) -> Iterator[None]:
    """Inside, torchrun's agent that gets a signal gives its ranks as long as they ask for in `folder`.

    torchrun's own `--shutdown-timeout` (torch 2.13) is read when nothing is measured yet. So the one function that
    waits for the ranks is replaced. It also waits for the ranks that a failed one leaves behind; that keeps its 30 s,
    because they wait for the failed one and save nothing.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    close = PContext.close

    def patient(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException):
            # Schedulers repeat SIGTERM, and torchrun kills its ranks at the third. Ctrl-C still ends at once.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            timeout = _stop_limit(folder, timeout)
        close(self, death_sig, timeout)

    PContext.close = patient  # type: ignore[method-assign]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _stop_limit(folder: Path, default: int) -> int:
    """Seconds that the ranks may take to stop; `default` where they have not asked for any."""
    try:
        return int(float(os.environ.get(SHUTDOWN_TIMEOUT) or (folder / STOP_LIMIT).read_text()))
    except (OSError, ValueError):
        return default


def _exit_code(failures: Iterable[Any], first: Any) -> int:
    """A fault that any rank has named, else the code of the rank that failed first; 128 + the signal, as shells have
    it, where one ended that rank."""
    for failure in failures:
        if failure.exitcode in FAULTS:
            return int(failure.exitcode)
    return int(first.exitcode if first.exitcode > 0 else 128 - first.exitcode)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
