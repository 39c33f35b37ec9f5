"""A figure of REPORT.md: its arms, and what it makes of their results.

A new figure is one file with a subclass of `Figure`, one line in registry.py, one line in README.md and a section of
REPORT.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure as Canvas

from experiments.comparison import Verdict
from experiments.corpus import Corpus
from moba_train.errors import UserError

Result = dict[str, Any]
"""What is known of a finished arm: see `run_arm.arm_result`."""


def key_of(result: Result) -> str:
    """`Arm.key` of the arm that a result is of."""
    return f"{result['name']}-seed{result['seed']}"


@dataclass(frozen=True)
class Arm:
    """One run of the real trainer, and what is evaluated at its end."""

    name: str
    """Unique among the arms of one seed: letters, digits, `.`, `_` and `-`."""
    seed: int
    recipe: Mapping[str, Any]
    """Keys of a recipe: `model`, `stages`, `batch_tokens` at least. `run_arm.complete_recipe` adds vocabulary and data,
    unless they are given, folders and how to run. Paths of corpora are names in the corpus' folder, or of what
    `Figure.prepare` made; `init_from` is a folder in it."""
    evaluations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Evaluations of the last checkpoint, by name: the arguments of `moba-train eval` behind the checkpoint, where
    `--data` is followed by the name of a corpus. Those in the recipe's section `evaluation` run in any case, at the end
    of each stage."""
    added: Mapping[str, float] = field(default_factory=dict)
    """Corpora that are blended with the training text, by name as in the recipe, with their shares of the tokens."""
    parent: str | None = None
    """Name of the arm of the same seed whose last checkpoint gives the first weights."""
    package: str = ""
    """Module without which the arm is not run; empty: none."""
    is_timed: bool = False
    """Whether the arm is about its time, so that nothing else may share its GPU."""

    def problem(self, sharing: int) -> str:
        """Why it cannot be run here where so many arms share a GPU; empty: it can."""
        if self.package and find_spec(self.package) is None:
            return f"the module {self.package} is not installed"
        if self.is_timed and sharing > 1:
            return "its time counts only alone on a GPU (--arms-per-gpu 1)"
        return ""

    @property
    def key(self) -> str:
        """Name and seed: unique in a figure."""
        return f"{self.name}-seed{self.seed}"


@dataclass(frozen=True)
class Finding:
    """What the results of a figure say."""

    verdicts: Sequence[Verdict]
    """A sentence each; none where there are too few arms to say anything."""
    rows: Sequence[Sequence[str]]
    """A table; the first row is its head."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Fits and whatever else is worth keeping, as JSON values."""
    left_out: Sequence[str] = ()
    """Arms that cannot be compared with the others, and why."""

    @property
    def is_begun(self) -> bool:
        """Whether there is anything to show: some figures compare arms, and have nothing before there are two."""
        return len(self.rows) > 1


class Figure(ABC):
    """One figure. Its class docstring says what it is about; `python -m experiments --list` prints the first line."""

    name: ClassVar[str]
    title: ClassVar[str]
    seeds: ClassVar[tuple[int, ...]] = (0, 1)
    """Seeds of a complete figure, without the arms that it refuses; its smallest form has the first of them."""
    height: ClassVar[float] = 2.8
    """Inches of the picture."""
    corpus: ClassVar[str] = "data/long"
    """Folder of the corpus in the commands of README.md; empty: the figure makes all of its documents."""
    source: ClassVar[str] = ""
    """Name of the figure whose arms and result file this one has; empty: its own."""

    def with_seconds_per_arm(self, seconds: int) -> "Figure":
        """The figure with arms of this many training seconds. Raises UserError for a figure whose arms have a number of
        tokens of their own."""
        raise UserError(f"--seconds-per-arm: the arms of {self.name} have a fixed number of tokens; leave it out")

    def settings(self, quick: bool) -> dict[str, Any]:
        """Further settings that the results depend on; a file holds results of one setting alone."""
        return {}

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The arms of one seed, in the order in which they are worth running; `quick`: the smallest form that trains
        on a CPU in seconds. Not asked of figures with a `source`."""
        raise NotImplementedError

    @abstractmethod
    def find(self, results: Sequence[Result]) -> Finding:
        """What the arms that are finished say; any of them may be missing."""

    @abstractmethod
    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Draw what the arms that are finished say, beside what was published."""

    def refuses(self, parent: Result, quick: bool) -> str:
        """Why arms that begin with the weights of `parent` are not worth running; empty: they are."""
        return ""

    def refusal(self, arm: Arm, results: Sequence[Result], quick: bool) -> str:
        """Why an arm is not worth running, by the result of its parent; empty: it is, or its parent has no result."""
        parents = (one for one in results if (one["name"], one["seed"]) == (arm.parent, arm.seed))
        return next((self.refuses(parent, quick) for parent in parents), "")

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:  # noqa: B027  # optional, not abstract
        """Make corpora of the figure's own in `folder`, which arms may name. Called before any arm runs; what an
        earlier call has made is still there."""
