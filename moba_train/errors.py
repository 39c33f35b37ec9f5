"""Errors that users can correct, and what the programs print about them.

Each error carries a message that names the key or file, what was found there and what is allowed. The command-line
entry points print the message without a traceback and exit with the error's `exit_code`; any other exception is a bug
of this package and keeps its traceback.

A rank prints the message once, and next to nothing after it. torchrun, another process, would add two lines for each
rank and a table of their exit codes; `tools/launch/torchrun.py` leaves these out where the exit code says that a rank
has told what is wrong. Plain torchrun cannot be quieted: there each rank leaves the message in the file from which
torchrun fills its table, whose last lines it becomes. A run that is refused before it trains is refused again by a
restart: the rank leaves a file in torchrun's folder, and restarted ranks end at once. Imports nothing heavy.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def number_ranges(numbers: Iterable[int]) -> str:
    """Distinct numbers in short: `0-28, 31`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: `rank 3` or `ranks 3-9, 12`."""
    return _named("rank", ranks)


def named_layers(layers: Iterable[int]) -> str:
    """Layers in short: `layer 3` or `layers 0-28, 31`."""
    return _named("layer", layers)


def _named(noun: str, numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return f"{noun}{'s' * (len(listed) > 1)} {number_ranges(listed)}"


class UserError(Exception):
    """Something outside the program is wrong: a recipe, a file, the machine. `str()` is the complete message."""

    exit_code: int = 2
    """Tells a scheduler what to do; the codes other than 2 are those of the BSD header sysexits.h."""

    said_elsewhere: bool | None = None
    """True if another rank reports this error, so that this one need not; None: the ranks had not joined yet."""

    may_pass: bool = False
    """True if another start of the same ranks may not meet it: a file system, a store or a network that did not answer,
    a lock that is given back later. torchrun's restarts are for these."""


class ConfigError(UserError):
    """The recipe cannot be used. `problems` holds all problems found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


class PlanError(UserError):
    """A planned run needs more memory than a GPU has."""


class DataError(UserError):
    """A corpus is missing, truncated, changed since the checkpoint, or does not fit the model's vocabulary."""


class UnreadableDataError(DataError):
    """A corpus could not be read, which does not mean that it is damaged."""

    may_pass = True


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, corrupted, or does not fit the model."""


class ForeignFileError(UserError, ValueError):
    """A file from elsewhere that is not read: not a regular file, too large, nested too deeply, or outside of the
    folders that are allowed. Also a ValueError, so that readers that add a remedy to errors of content add it here."""


class LaunchError(UserError):
    """The machine or the launcher does not offer what the recipe asks for."""


class UnusableFolderError(LaunchError):
    """The run folder cannot be used now: another run holds it, or its file system refuses."""

    may_pass = True


class BrokenNodeError(LaunchError):
    """A GPU is known to be broken before the run starts. The same command may succeed on other nodes."""

    exit_code = 75  # EX_TEMPFAIL


class CommunicationError(UserError):
    """Other ranks did not answer in time, or have ended."""

    may_pass = True


class EndedElsewhereError(UserError):
    """Another rank has ended the run with an error of the user's, which it reports; this rank waited for it."""

    said_elsewhere: bool | None = True

    def __init__(self, code: int, rank: int | None = None) -> None:
        """rank: the other one, if it has not joined: the first rank of each node then reports it."""
        self.exit_code = code
        text = f"has ended the run with exit code {code}"
        if rank is None:
            self.may_pass = True  # if it may not, the other one tells the next start
            super().__init__(f"another rank {text}")
        else:
            self.said_elsewhere = None
            super().__init__(f"rank {rank} {text}; the output of its node says why")


class TrainingError(UserError):
    """Training cannot go on: the loss or the gradients are not finite, or spikes outlast what the recipe allows."""


class ReproducibleFaultError(TrainingError):
    """A loss or gradient norm that is not finite, again when the step is repeated: the same on any node."""

    exit_code = 65  # EX_DATAERR


class SuspectNodeError(TrainingError):
    """Values that were not finite and were finite when the step was repeated, too often for sound hardware. The same
    command may succeed on other nodes."""

    exit_code = 75  # EX_TEMPFAIL


LAUNCHER_FOLDER = "MOBA_TRAIN_LAUNCHER_FOLDER"
"""Environment variable: our launcher's folder of this start of the ranks."""

OWN_CODES = frozenset({UserError.exit_code, ReproducibleFaultError.exit_code, BrokenNodeError.exit_code})
"""Exit codes of ranks that have told, in words, why they ended."""

TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""torchrun's environment variable: file from which it reads why a rank failed, `attempt_0/3/error.json` for rank 3 of
the node, in a folder of all its starts of ranks."""


def print_error(error: UserError) -> None:
    """Print the message on stderr, unless another rank says the same.

    Before the ranks have joined, all ranks of a node find the same error, and the first one prints it.
    """
    text = _full_text(error)
    _tell_torchrun(text)
    rank = int(os.environ.get("RANK", 0))
    said = os.environ.get("LOCAL_RANK", "0") != "0" if error.said_elsewhere is None else error.said_elsewhere
    if said:
        return
    where = f"[rank {rank}] " if rank and error.said_elsewhere is not None else ""
    print(where + text, file=sys.stderr, flush=True)


def _full_text(error: UserError) -> str:
    notes = [note for note in getattr(error, "__notes__", ()) if note.removeprefix("in ") not in str(error)]
    return "\n".join([f"error: {error}", *notes])


def _tell_torchrun(text: str) -> None:
    """Make `text` what plain torchrun's report names as this rank's failure.

    Ranks that print nothing also do it: torchrun ends its report with the rank that failed first. Our launcher
    (`tools/launch/torchrun.py`) needs no such file, and torchrun in it would log that it cannot be copied.
    """
    if TORCHRUN_ERROR_FILE in os.environ and LAUNCHER_FOLDER not in os.environ:
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(os.environ[TORCHRUN_ERROR_FILE]).write_text(json.dumps(content))


def refuse(error: UserError) -> int:
    """Note for the ranks that torchrun starts next on this node that they would fail as well. Returns the exit code."""
    with suppress(OSError, LookupError):
        _refusal().write_text(f"{error.exit_code}\n{_full_text(error)}")
    return error.exit_code


def leave_if_refused() -> None:
    """End this process at once, silently, if a start before it was refused."""
    with suppress(OSError, LookupError, ValueError):
        code, _, text = _refusal().read_text().partition("\n")
        _tell_torchrun(text)
        sys.exit(int(code))


def _refusal() -> Path:
    """The file of `refuse`. Raises LookupError without torchrun, or where its folder is not as expected."""
    attempt = Path(os.environ[TORCHRUN_ERROR_FILE]).parents[1]
    if not attempt.name.startswith("attempt_"):
        raise LookupError(attempt)
    return attempt.with_name("moba_train_refused")
