"""Errors that users can correct.

Each carries a message that names the key or file, what was found there and what is allowed. The command-line entry
points print the message without a traceback and exit with the error's `exit_code`; any other exception is a bug of this
package and keeps its traceback.
"""


class UserError(Exception):
    """Something outside the program is wrong: a recipe, a file, the machine. `str()` is the complete message."""

    exit_code: int = 2
    """Tells a scheduler what to do; the codes other than 2 are those of the BSD header sysexits.h."""

    said_elsewhere: bool | None = None
    """Whether another rank reports this error, so that this one need not; None: the ranks had not joined yet."""


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


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, corrupted, or does not fit the model."""


class ForeignFileError(UserError, ValueError):
    """A file from elsewhere that is not read: not a regular file, too large, nested too deeply, or outside of the
    folders that are allowed. A ValueError too, so that readers that add a remedy to errors of content add it here."""


class LaunchError(UserError):
    """The machine or the launcher does not offer what the recipe asks for."""


class BrokenNodeError(LaunchError):
    """A GPU is known to be broken before the run starts. The same command may succeed on other nodes."""

    exit_code = 75  # EX_TEMPFAIL


class CommunicationError(UserError):
    """Other ranks did not answer in time, or have ended."""


class EndedElsewhereError(UserError):
    """Another rank has ended the run with an error of the user's, which it reports; this rank waited for it."""

    said_elsewhere = True

    def __init__(self, code: int) -> None:
        self.exit_code = code
        super().__init__(f"another rank has ended the run with exit code {code}")


class TrainingError(UserError):
    """Training cannot go on: the loss or the gradients are not finite, or spikes outlast what the recipe allows."""


class ReproducibleFaultError(TrainingError):
    """A loss or gradient norm that is not finite, again when the step is repeated: the same on any node."""

    exit_code = 65  # EX_DATAERR


class SuspectNodeError(TrainingError):
    """Values that were not finite and were finite when the step was repeated, too often for sound hardware. The same
    command may succeed on other nodes."""

    exit_code = 75  # EX_TEMPFAIL
