"""torchrun on this machine for `moba-train train`, with an orderly end at SIGTERM and Ctrl-C.

torchrun passes the signal on to its ranks, waits for them, and then raises an exception however they have ended. Here
rank 0 leaves a file behind when it has stopped as asked, and the command then ends with code 0.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moba_train.training.stop import STOPPED_FILE, listen


def launch(recipe: str, overrides: Sequence[str], ranks: int | None, restarts: int) -> int:
    """Train on `ranks` ranks, by default one for each GPU. Returns the exit code; as torchrun does, raises
    ChildFailedError when a rank fails and no restart is left."""
    listen()  # until torchrun handles signals itself, there is nothing to save
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ranks = ranks or torch.cuda.device_count() or 1
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    with tempfile.TemporaryDirectory() as folder:
        stopped = Path(folder) / "stopped"
        os.environ[STOPPED_FILE] = str(stopped)
        try:
            run.main([*options, "-m", "moba_train.train", recipe, *overrides])
        except SignalException as error:
            if not stopped.exists():
                print(
                    f"error: the ranks did not stop in time after {error.sigval.name} and were killed", file=sys.stderr
                )
                return 128 + error.sigval
    return 0
