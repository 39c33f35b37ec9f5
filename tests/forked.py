"""Processes that begin with torch and the trainer imported, which takes longer than what most tests have them do."""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED_LATE = [
    "torch._dynamo",
    "torch._inductor.compile_fx",  # with 800 modules, by the first that compiles
    "networkx",
    "torch.distributed.run",
    "moba_train.report.loss_plot",
    "moba_train.report.position_plot",
    "matplotlib.backends.backend_agg",
]
"""By training runs: by torch, or with matplotlib."""

GARBAGE_SEARCHES = 1_000, 20, 100
"""For `gc.set_threshold`, after `gc.freeze`: Python searches the old objects whenever those that are not frozen have
grown by a quarter, and with its own numbers does so for a twentieth of the tests' time."""


def forked() -> ForkServerContext:
    """Its processes are forks of one that has imported all this once. They have the environment of that one: what a
    test changes in its own does not reach them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moba_train.train", "moba_train.cli", *IMPORTED_LATE])
    return context
