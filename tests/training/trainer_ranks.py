"""Training in a few processes that live on from run to run: starting Python and torch takes longer than a tiny run."""

import os
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch.multiprocessing as mp
from tiny_run import Run


@dataclass
class Ranks:
    """Processes that train together when told to, as torchrun's would; `per_node` of them pretend to share a node."""

    processes: list[BaseProcess] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)

    def train(self, run: Run, ranks: int, *arguments: str, per_node: int | None = None) -> None:
        """Train to the end on so many ranks. Fails when any of them does."""
        while len(self.processes) < ranks:
            context = mp.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)
        command = [str(run.write_recipe()), *arguments]
        port = _free_port()
        for rank in range(ranks):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_WORLD_SIZE": per_node or ranks,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            self.pipes[rank].send((command, {key: str(value) for key, value in environment.items()}))
        deadline = time.monotonic() + 120
        for rank in range(ranks):
            assert self.pipes[rank].poll(max(0.0, deadline - time.monotonic())), f"rank {rank} does not come back"
            assert self.pipes[rank].recv() == 0, f"rank {rank} failed; see its output"

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()  # SIGTERM would only ask the trainer to stop
            process.join()


def _work(pipe: Connection) -> None:
    import torch

    from moba_train.train import main

    torch.set_num_threads(1)
    while True:
        command, environment = pipe.recv()
        os.environ.update(environment)
        try:
            pipe.send(main(command))
        except BaseException as error:
            pipe.send(repr(error))
            raise


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
