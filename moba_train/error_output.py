"""What the programs print about an error of the user's: its message, once, and next to nothing after it.

A rank prints the message. torchrun, another process, would add two lines for each rank and a table of their exit
codes; `moba_train.launch` leaves these out where the exit code says that a rank has told what is wrong. Plain torchrun
cannot be quieted: there each rank leaves the message in the file from which torchrun fills its table, whose last lines
it becomes. Where the recipe is wrong, a restart cannot help: the rank leaves a file behind, and restarted ranks end at
once. Imports nothing heavy.
"""

import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from moba_train.errors import BrokenNodeError, ReproducibleFaultError, UserError

REFUSED_FILE = "MOBA_TRAIN_REFUSED_FILE"
"""Environment variable: file into which a rank writes its exit code when another start would fail as well."""

OWN_CODES = frozenset({UserError.exit_code, ReproducibleFaultError.exit_code, BrokenNodeError.exit_code})
"""Exit codes of ranks that have told, in words, why they ended."""

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's environment variable: file from which it reads why a rank failed."""

TORCHRUN_LOGGER = "torch.distributed.elastic.multiprocessing.api"


def print_error(error: UserError) -> None:
    """Print the message on stderr, unless another rank says the same.

    Before the ranks have joined, all ranks of a node find the same error, and the first one prints it.
    """
    notes = [note for note in getattr(error, "__notes__", ()) if note.removeprefix("in ") not in str(error)]
    text = "\n".join([f"error: {error}", *notes])
    _tell_torchrun(text)
    rank = int(os.environ.get("RANK", 0))
    said = os.environ.get("LOCAL_RANK", "0") != "0" if error.said_elsewhere is None else error.said_elsewhere
    if said:
        return
    where = f"[rank {rank}] " if rank and error.said_elsewhere is not None else ""
    print(where + text, file=sys.stderr, flush=True)


def _tell_torchrun(text: str) -> None:
    """Make `text` what plain torchrun's report names as this rank's failure.

    Ranks that print nothing do it, too: torchrun ends its report with the rank that failed first. `moba_train.launch`
    needs no such file, and torchrun in it would log that it cannot be copied.
    """
    if TORCHRUN_ERROR_FILE in os.environ and REFUSED_FILE not in os.environ:
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(os.environ[TORCHRUN_ERROR_FILE]).write_text(json.dumps(content))


def refuse(code: int) -> int:
    """Tell the launcher that starting again leads nowhere. Returns `code`, the exit code of this rank."""
    if REFUSED_FILE in os.environ:
        with suppress(OSError):
            Path(os.environ[REFUSED_FILE]).write_text(str(code))
    return code


def leave_if_refused() -> None:
    """End this process at once, silently, if a start before it was refused."""
    with suppress(OSError, KeyError, ValueError):
        sys.exit(int(Path(os.environ[REFUSED_FILE]).read_text()))


def quiet_torchrun() -> None:
    """Leave out torchrun's lines about ranks that it ends, and about a rank that has told what is wrong."""
    logging.getLogger(TORCHRUN_LOGGER).addFilter(_says_more)


def _says_more(record: logging.LogRecord) -> bool:
    """Whether the line of torchrun's log tells something that the ranks have not printed."""
    text = record.getMessage()
    told = any(text.startswith(f"failed (exitcode: {code})") for code in OWN_CODES)
    return not told and " closing signal " not in text
