"""Places where steps run: this process, or processes side by side that each have GPUs of their own."""

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from moba_train.errors import UserError
from moba_train.output_files import make_folder, open_to_change

_DEVICES = "CUDA_VISIBLE_DEVICES"
Run = Callable[[Sequence[str]], int]


Place = Callable[[Run, Sequence[str], Path], "Future[int]"]
"""Begins `run(words)`, of one step at a time; the result is its status. The path: a file for what it prints, if other
steps run beside it."""


def here(run: Run, words: Sequence[str], log: Path) -> "Future[int]":
    """Run it in this process, at once."""
    future: Future[int] = Future()
    future.set_result(run(words))
    return future


def _logged(run: Run, words: Sequence[str], log: Path) -> int:
    """Run it with its output in the file `log`. Returns its status: 1 after an exception, which the log then has."""
    make_folder(log.parent)
    file = open_to_change(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True)  # what is waiting goes to the log of the step before
        os.dup2(file, descriptor)  # also for what torch and its libraries print
    os.close(file)
    try:
        status = run(words)
    except BaseException:  # few exceptions of typer's and torch's can be sent to another process
        traceback.print_exc()
        status = 1
    if not _parent().is_alive():
        os._exit(status)  # the queue of steps would wait for ever
    return status


def _begin(devices: str) -> None:
    """Give this process these GPUs, before it asks for any, and end it when its parent has ended."""
    if devices:
        os.environ[_DEVICES] = devices
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ask this process to end after its parent: it would go on beside the same command, begun again."""
    _parent().join()
    os.kill(os.getpid(), signal.SIGTERM)  # training saves first


def _parent() -> BaseProcess:
    parent = parent_process()
    assert parent is not None
    return parent


@contextmanager
def places(jobs: int, gpus: int) -> Iterator[list[Place]]:
    """Places for this number of steps at a time, with `gpus` GPUs each; without any GPU, all share the CPU. Raises
    UserError when there are too few."""
    if jobs == 1:
        yield [here]
        return
    count = torch.cuda.device_count()
    given = os.environ.get(_DEVICES)
    # Identifiers as well as numbers; those from the first one that CUDA does not know are ignored, as by CUDA.
    ids = [*map(str, range(count))] if given is None else given.split(",")[:count]
    if ids and len(ids) < jobs * gpus:
        raise UserError(f"--jobs and --gpus: given {jobs} and {gpus}; allowed: at most {len(ids)} GPUs together")
    with ExitStack() as stack:
        made: list[Place] = []
        for first in range(0, jobs * gpus, gpus):
            devices = ",".join(ids[first : first + gpus])
            pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (devices,))
            # The process stays: what it has imported and compiled serves its next step too.
            stack.enter_context(pool)
            made.append(lambda *step, pool=pool: pool.submit(_logged, *step))
        yield made
