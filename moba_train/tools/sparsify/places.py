"""Places where steps run: this process, or processes side by side that each have GPUs of their own."""

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import torch

from moba_train.errors import UserError
from moba_train.output_files import make_folder, open_to_change

_DEVICES = "CUDA_VISIBLE_DEVICES"
Run = Callable[[Sequence[str]], int]


class Place(Protocol):
    """Runs one step at a time."""

    def start(self, run: Run, words: Sequence[str], log: Path) -> "Future[int]":
        """Begin `run(words)`; the result is its status. log: file for what it prints, if other steps run beside it."""
        ...


class Here:
    """This process."""

    def start(self, run: Run, words: Sequence[str], log: Path) -> "Future[int]":
        """Run it at once."""
        future: Future[int] = Future()
        future.set_result(run(words))
        return future


class Beside:
    """A process that stays: what it has imported and compiled serves its next step too."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def start(self, run: Run, words: Sequence[str], log: Path) -> "Future[int]":
        """Run it there, with its output in the file `log`."""
        return self._pool.submit(_logged, run, words, log)


def _logged(run: Run, words: Sequence[str], log: Path) -> int:
    make_folder(log.parent)
    file = open_to_change(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # what is waiting goes to the log of the step before
        os.dup2(file, descriptor)  # also for what torch and its libraries print
    os.close(file)
    return run(words)


def _use(devices: str) -> None:
    """Give this process these GPUs, before it asks for any."""
    if devices:
        os.environ[_DEVICES] = devices


@contextmanager
def places(jobs: int, gpus: int) -> Iterator[list[Place]]:
    """Places for this number of steps at a time, with `gpus` GPUs each; without any GPU, all share the CPU. Raises
    UserError when there are too few."""
    if jobs == 1:
        yield [Here()]
        return
    given = os.environ.get(_DEVICES)
    ids = [*map(str, range(torch.cuda.device_count()))] if given is None else [one for one in given.split(",") if one]
    if ids and len(ids) < jobs * gpus:
        raise UserError(
            f"--jobs: given {jobs}; allowed: at most {len(ids) // gpus}, with {gpus} of {len(ids)} GPUs each"
        )
    with ExitStack() as stack:
        made: list[Place] = []
        for first in range(0, jobs * gpus, gpus):
            devices = ",".join(ids[first : first + gpus])
            pool = ProcessPoolExecutor(1, get_context("spawn"), _use, (devices,))
            made.append(Beside(stack.enter_context(pool)))
        yield made
