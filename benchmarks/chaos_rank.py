"""One rank of a disturbed run: the real training program, with faults that strike inside the process.

    torchrun ... -m benchmarks.chaos_rank RECIPE.yaml

A file named after a fault in the folder $CHAOS_FAULTS arms it; the first rank that meets it removes the file and
suffers it, once.
"""

import errno
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import moba_train.checkpoint.manifest as manifest
import moba_train.parallel.forward as forward
import moba_train.run.trainer as trainer
import moba_train.train
from moba_train.data.batch import Batch
from moba_train.model.loss import LossSums
from moba_train.model.transformer import Transformer
from moba_train.parallel.run_lock import run_folder_lock

NAN = "nan"
"""The loss of one micro-batch is NaN on one rank, as after a bit flip in the forward pass."""
POISON = "poison"
"""NaN in the optimizer state of one rank, after an update."""
READ_ERROR = "read_error"
"""A file of a checkpoint cannot be read, the first time."""

LOCK_WAIT_S = 5.0
"""A second trainer gives up after this time and not after 30 s, in which a run of the suite may end."""


def strikes(fault: str) -> bool:
    """Whether this process suffers `fault` now."""
    try:
        (Path(os.environ["CHAOS_FAULTS"]) / fault).unlink()
    except FileNotFoundError:
        return False
    return True


def install() -> None:
    """Put the faults into the functions of the trainer."""
    real_loss = forward.training_loss
    real_hash = manifest._sha256_of
    real_update = trainer.Trainer._update

    def training_loss(model: Transformer, batch: Batch) -> LossSums:
        sums = real_loss(model, batch)
        return sums._replace(loss=sums.loss * torch.nan) if strikes(NAN) else sums

    def sha256_of(path: Path) -> str:
        if strikes(READ_ERROR):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real_hash(path)

    def update(self: trainer.Trainer, *arguments: Any) -> None:
        real_update(self, *arguments)
        optimizer = self.learner.optimizer
        if optimizer.state and strikes(POISON):
            state = next(iter(optimizer.state.values()))["exp_avg"]
            (state.to_local() if isinstance(state, DTensor) else state).view(-1)[:1] = torch.nan

    moba_train.train.run_folder_lock = partial(run_folder_lock, wait_s=LOCK_WAIT_S)
    forward.training_loss = training_loss
    manifest._sha256_of = sha256_of
    trainer.Trainer._update = update  # type: ignore[method-assign, assignment]


def train(arguments: list[str]) -> int:
    """Train as one rank, with the faults installed. Returns its exit code."""
    install()
    return moba_train.train.main(arguments)


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
