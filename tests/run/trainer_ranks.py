"""Training in a few processes that live on from run to run: starting Python and torch takes longer than a tiny run."""

import gc
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from moba_train.train import main
from tests.forked import GARBAGE_SEARCHES, end_process_groups, forked
from tests.run.tiny_run import Run


@dataclass
class Ranks:
    """Processes that train together when told to, as torchrun's would; `per_node` of them pretend to share a node."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def train(self, run: Run, ranks: int, *arguments: str, per_node: int | None = None) -> None:
        """Train to the end on `ranks` ranks. Fails when any of them does."""
        self.work(run_training, [str(run.write_recipe()), *arguments], ranks, per_node)

    def work(
        self, program: Callable[..., int | None], arguments: Sequence[Any], ranks: int, per_node: int | None = None
    ) -> None:
        """Call `program(*arguments)`, a module's function, on `ranks` ranks. Fails when one raises or gives not 0; the
        next call then has new processes."""
        try:
            self._call(program, arguments, ranks, per_node)
        except BaseException:
            self.close()
            raise

    def _call(
        self, program: Callable[..., int | None], arguments: Sequence[Any], ranks: int, per_node: int | None
    ) -> None:
        self.start(ranks)
        # As torchrun's store, it outlives the ranks: with one in rank 0, a slower rank that fails as well could no
        # longer read that rank 0 has said why.
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(ranks):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": per_node or ranks,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            self.pipes[rank].send((program, arguments, {key: str(value) for key, value in environment.items()}))
        deadline = time.monotonic() + 300  # where nothing is cached, compiling takes a minute of a quiet core
        answers: list[tuple[Any, bool]] = []
        for rank in range(ranks):
            back = self.pipes[rank].poll(max(0.0, deadline - time.monotonic()))
            assert back, f"rank {rank} does not come back; those before it: {answers}"
            answers.append(self.pipes[rank].recv())
        # All of them: one that fails makes others fail, too.
        results = [result for result, _ in answers]
        failed = [f"rank {rank} failed" for rank, result in enumerate(results) if result != 0]
        assert not failed, f"{', '.join(failed)}; results: {results}"
        if not all(is_reusable for _, is_reusable in answers):
            self.close()

    def start(self, ranks: int) -> None:
        """Have at least `ranks` processes."""
        while len(self.processes) < ranks:
            ours, theirs = forked().Pipe()
            process = forked().Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()  # SIGTERM would only ask the trainer to stop
            process.join()
        self.processes, self.pipes = [], []


def run_training(*command: str) -> int:
    """`python -m moba_train.train`."""
    return main(list(command))


def train_traced(*command: str) -> int:
    """`run_training` with everything of torch.compile but its C++ compiler, which takes a minute where nothing is
    cached: tracing, the graphs of both passes, what they keep and recompute."""
    torch.compiler.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return main(list(command))


def run_command(*command: str) -> int:
    """`moba-train`."""
    from moba_train.tools.cli import app

    return app(list(command), standalone_mode=False) or 0


def _work(pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(*GARBAGE_SEARCHES)
    while True:
        program, arguments, environment = pipe.recv()
        os.environ.update(environment)
        try:
            result = program(*arguments) or 0
            end_process_groups()  # also as torch's cache names those of this run, which the next one may lack
            # A rank that was waiting for one that failed leaves its process group as it is.
            pipe.send((result, not dist.is_initialized()))
        except BaseException as error:
            pipe.send((repr(error), False))
            raise


def free_port() -> int:
    """A port on which no process listens, below those from 32768 on that Linux gives to whichever process asks next."""
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
