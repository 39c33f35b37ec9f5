"""torchrun, with the exit code of the ranks: torchrun's own is 1 whatever they end with.

python -m moba_train.launch --nproc-per-node 8 -m moba_train.train RECIPE.yaml key.path=value ...
"""

import sys
from collections.abc import Iterable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import main as torchrun

from moba_train.errors import BrokenNodeError, ReproducibleFaultError

FAULTS = (BrokenNodeError.exit_code, ReproducibleFaultError.exit_code)
"""Exit codes that say why a run ended, whichever rank was the first to leave."""


def main(arguments: list[str] | None = None) -> int:
    """Run torchrun with these arguments. Returns 0, or the exit code of the ranks on this node that failed."""
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return _exit_code(error.failures.values(), error.get_first_failure()[1])
    return 0


def _exit_code(failures: Iterable[ProcessFailure], first: ProcessFailure) -> int:
    """A fault that any rank has named, else the code of the rank that failed first; 128 + the signal, as shells have
    it, where one ended that rank."""
    for failure in failures:
        if failure.exitcode in FAULTS:
            return failure.exitcode
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


if __name__ == "__main__":
    sys.exit(main())
