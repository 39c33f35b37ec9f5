"""Which attentions a model is evaluated with, on the same weights.

The interface of an evaluation: what it needs, when it is due, and what it gives.

A new evaluation is one file with a subclass of `Evaluation` and its section, and one entry point of the group
`moba_train.evaluations`. It then runs while a stage trains (stage.py) and in `moba-train eval`
(checkpoint.py), and a stage may train `until` one of its numbers is good.

`moba-train eval RUN --tasks NAME,...` asks for evaluations by `Evaluation.name`, whether the recipe has them or not:
`switched_on` adds the section of each task that the recipe leaves null, with defaults that fit the checkpoint's stage;
overrides such as `evaluation.<name>.<key>=value` are laid over it. A class whose section has a default for every key
need not define `switched_on`. `problems` is then asked of the tasks that run, for a recipe with that stage alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention, resolve_layers
from moba_train.config.base import Section
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard

Layers = tuple[LayerAttention, ...]
"""The attention of every layer, first to last."""


def name_of(layers: Layers) -> str:
    """The attention kinds of the layers but `full`, in alphabetical order: `moba`, `moba+nsa`; "full" where all layers
    are. Layers of full attention among others, as in hybrid recipes, do not count: `full` is what these are compared
    with."""
    return "+".join(sorted({layer.kind for layer in layers} - {"full"})) or "full"


def with_full(layers: Layers) -> dict[str, Layers]:
    """These layers, and full attention in every layer where they are anything else, by name."""
    full = tuple(LayerAttention("full", FullAttention.Options()) for _ in layers)
    return {name_of(layers): layers} | ({"full": full} if name_of(layers) != "full" else {})


def variants(config: RunConfig, stage: Stage, wanted: Literal["full", "own", "both"]) -> dict[str, Layers]:
    """The attentions that a checkpoint of `stage` is evaluated with, by name.

    `own` is the stage's attention or, where all its layers are full, the recipe's; where those are full, too, it is
    `full`.
    """
    own = stage.attention
    if name_of(own) == "full":
        own = resolve_layers(config.attention, config.model.layers)
    found = with_full(own)
    if wanted == "both":
        return found
    name = name_of(own) if wanted == "own" else "full"
    return {name: found[name]}


class EvaluationStoppedError(Exception):
    """The run was asked to stop while an evaluation ran. Not an error of anyone's: the run saves and ends in order."""


def never_stops() -> None:
    """What `EvaluationContext.between_batches` is outside training."""


def untracked(items: Sequence[int], what: str) -> Iterable[int]:
    """The items, without showing progress."""
    return items


@dataclass(frozen=True)
class EvaluationContext:
    """What an evaluation works with, on every rank: the model, this rank's part of the data, the attentions to try."""

    model: Transformer
    """Sharded, with the stage's RoPE and engines."""
    stage: Stage
    data_shard: DataShard
    device: torch.device
    attentions: Mapping[str, Layers] = field(default_factory=dict)
    """Attention of every layer, by a name for people; at least one where an evaluation runs."""
    between_batches: Callable[[], None] = never_stops
    """Every evaluation calls it before each forward pass, on all ranks together. Raises EvaluationStoppedError, on all
    of them, when the run is asked to stop."""
    track: Callable[[Sequence[int], str], Iterable[int]] = untracked
    """Shows progress through a loop over the first argument, which the second one names."""
    trained_length: int | None = None
    """Longest sequences that the weights were trained on; None: those of the recipe's stages up to this one, which are
    others where a checkpoint is evaluated at another length."""

    @property
    def own(self) -> str:
        """Name of the attention that numbers are about: the stage's own where it is evaluated, else the first."""
        name = name_of(self.stage.attention)
        return name if name in self.attentions else next(iter(self.attentions))

    def each_attention(self) -> Iterator[str]:
        """Switch the model from one attention to the next, yield their names, and end with the stage's own."""
        for name, layers in self.attentions.items():
            self._set_attention(layers)
            yield name
        self.restore_attention()

    def restore_attention(self) -> None:
        """Switch the model to the stage's own attention."""
        self._set_attention(self.stage.attention)

    def _set_attention(self, layers: Layers) -> None:
        self.model.set_attention(build_attention(layers, self.model.config.head_width))


@dataclass(frozen=True)
class EvaluationResult:
    """What one evaluation found, equal on every rank."""

    numbers: dict[str, float]
    """Numbers about the attention `own`, by name, for telemetry and for `until`."""
    message: str
    """One line for the log."""
    table: list[str]
    """Lines that `moba-train eval` prints: all attentions side by side."""
    data: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, as JSON values, for the report."""


class Evaluation(ABC):
    """One evaluation of one stage. Constructed and called on all ranks together."""

    name: ClassVar[str]
    """Type of its records in metrics.jsonl, and its key in evaluation.json."""
    data_name: ClassVar[str] = ""
    """Field of its data in metrics.jsonl where that is not `name`, because one of its numbers is called so; it begins
    with `name`, by which the report finds it."""
    Options: ClassVar[type[Section] | None] = None
    """Its section in YAML, which switches it on: `evaluation.NAME`; None: other keys do."""
    key: ClassVar[str]
    """YAML key that switches it on; by default that of its section."""
    numbers: ClassVar[frozenset[str]]
    """Names of the numbers that it gives in every stage."""
    numbers_against_full: ClassVar[frozenset[str]] = frozenset()
    """Names of the numbers that it gives where full attention is tried in addition to the stage's own."""

    every: int
    """Optimizer steps between evaluations while the stage trains."""
    compare_with_full: bool = False
    """Whether the recipe asks for full attention on the same weights too, where the stage has other layers."""
    missing: str = ""
    """What this stage lacks to be evaluated, in words; empty: nothing."""

    @abstractmethod
    def __init__(self, config: RunConfig, stage: Stage) -> None:
        """Open the data for `stage`. Raises DataError when a corpus is damaged."""

    def __init_subclass__(cls) -> None:
        if cls.Options is not None:
            cls.key = f"evaluation.{cls.name}"

    @classmethod
    def options_in(cls, config: RunConfig) -> Section | None:
        """Its section of the recipe; None where the recipe does not ask for it."""
        return config.evaluation.options_of(cls.name)

    @classmethod
    def enabled(cls, config: RunConfig) -> bool:
        """Whether the recipe asks for it."""
        return cls.options_in(config) is not None

    @classmethod
    def switched_on(cls, config: RunConfig, stage: Stage) -> RunConfig:
        """The recipe, asking for this evaluation: where its section is null, with defaults that fit `stage`."""
        return config if cls.enabled(config) else cls.with_section(config, {})

    @classmethod
    def with_section(cls, config: RunConfig, values: dict[str, Any]) -> RunConfig:
        """The recipe with this evaluation's section made of `values`, and of defaults for all other keys."""
        sections = config.evaluation.model_dump() | {cls.key.removeprefix("evaluation."): values}
        return config.model_copy(update={"evaluation": EvaluationConfig.model_validate(sections)})

    @classmethod
    def problems(cls, config: RunConfig) -> Iterator[str]:
        """Each problem of its section of the recipe, named by its key. Reads no file."""
        yield from ()

    @classmethod
    def pipeline_problem(cls, config: RunConfig) -> tuple[str, str] | None:
        """Key and value that a pipeline cannot do while it trains, and what to set instead; None: it can do all."""
        return None

    @classmethod
    def data_problems(cls, config: RunConfig, stage: Stage) -> Iterator[str]:
        """What the corpora lack for numbers that `until` can rely on in `stage`. Raises DataError when one is damaged.

        Reads indices, no tokens.
        """
        yield from ()

    @classmethod  # noqa: B027  # optional, not abstract
    def check_samples(cls, config: RunConfig, stage: Stage) -> None:
        """Raises DataError when a sample that `run` needs in `stage` cannot be made of the recipe's files, with the key
        to change: before training, because it would end the run at the stage's first evaluation."""

    @classmethod
    def sequences_per_pass(cls, stage: Stage) -> int:
        """How many sequences of `stage.seq_len` tokens one forward pass of a rank takes."""
        return stage.micro_batch_size

    def due(self, step: int, stage: Stage) -> bool:
        """Whether it runs after `step`: at multiples of `every`, and where the stage's tokens and the stage end."""
        return step % self.every == 0 or step in (stage.planned_end_step, stage.end_step)

    @abstractmethod
    def run(self, context: EvaluationContext) -> EvaluationResult:
        """Evaluate the model with each of the context's attentions; called on all ranks together.

        Numbers are equal on every rank and, up to rounding, for every parallel layout. Calls the context's
        `between_batches` before each forward pass, and leaves its exceptions alone.
        """


def finite(value: Any) -> Any:
    """`value` with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
