"""Errors that users can correct.

Each carries a message that names the key or file, what was found there and what is allowed. The command-line entry
points print the message without a traceback and exit with code 2; any other exception is a bug of this package and
keeps its traceback.
"""


class UserError(Exception):
    """Something outside the program is wrong: a recipe, a file, the machine. `str()` is the complete message."""


class ConfigError(UserError):
    """The recipe cannot be used. `problems` holds all problems found, not only the first."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the configuration:\n" + "\n".join(f"  - {problem}" for problem in problems))


class DataError(UserError):
    """A corpus is missing, truncated, changed since the checkpoint, or does not fit the model's vocabulary."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, corrupted, or does not fit the model."""


class ForeignFileError(UserError, ValueError):
    """A file from elsewhere that is not read: not a regular file, too large, nested too deeply, or outside of the
    folders that are allowed. A ValueError too, so that readers that add a remedy to errors of content add it here."""


class LaunchError(UserError):
    """The machine or the launcher does not offer what the recipe asks for."""


class CommunicationError(UserError):
    """Other ranks did not answer in time, or have ended."""


class TrainingError(UserError):
    """Training cannot go on: the loss or the gradients are not finite, or spikes outlast what the recipe allows."""
