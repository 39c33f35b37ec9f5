"""Interface of an evaluation: what it needs, when it is due, and what it gives.

An evaluation is one file with a subclass of `Evaluation` and its section of keys, and one entry point of the group
`moba_train.evaluations`. It then runs while a stage trains (run/evaluations.py) and in `moba-train eval`
(tools/evaluate.py), and a stage may train `until` one of its numbers is good. It is constructed from its own options
and an `EvaluationSetting`, and run with an `EvaluationContext`: it never sees the recipe.

`moba-train eval RUN --tasks NAME,...` asks for evaluations by `Evaluation.name`, also for those that the recipe leaves
null: they get their `default_options`, over which overrides such as `evaluation.<name>.<key>=value` are laid.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch

from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.data import SourceConfig
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.samples import StageData
from moba_train.errors import UserError
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard

Layers = tuple[LayerAttention, ...]
"""Attention of every layer, first to last."""

AnyOptions = TypeVar("AnyOptions", bound=Section | None)


def name_of(layers: Layers) -> str:
    """Attention kinds of the layers, in alphabetical order: `moba`, `moba+nsa`; "full" if all layers have full
    attention. Layers of full attention among others, as in hybrid models, do not count, because `full` is the name of
    what these are compared with."""
    return "+".join(sorted({layer.kind for layer in layers} - {"full"})) or "full"


def full_attention(layers: Layers, keep_windows: bool = False) -> Layers | None:
    """Full attention on the same weights (`AttentionKind.full_attention`); None if there is none in some layer."""
    found = [layer.full(keep_windows) for layer in layers]
    full = tuple(layer for layer in found if layer is not None)
    return full if len(full) == len(found) else None


def without_full(layers: Layers) -> str:
    """Sentence about those of these layers that have no full attention on the same weights; empty: all have one."""
    kinds = {layer.kind for layer in layers if layer.full() is None}
    return f"layers of {', '.join(sorted(kinds))} have no full attention on the same weights" if kinds else ""


def with_full(layers: Layers) -> dict[str, Layers]:
    """These layers by their name and, if there is one and it differs, full attention on the same weights."""
    found = {name_of(layers): layers}
    full = full_attention(layers)
    if full is not None and full != layers:
        found.setdefault("full", full)
    return found


def variants(stage: Layers, recipe: Layers, wanted: Literal["full", "own", "both"]) -> dict[str, Layers]:
    """Attentions that a checkpoint is evaluated with, by name.

    `own` is the attention of the checkpoint's `stage`. If all layers have full attention there, it is that of the
    `recipe`, which may also be `full`; `both` is `own` alone where full attention is none or the same. Raises UserError
    for `full` of kinds that have none.
    """
    own = recipe if name_of(stage) == "full" else stage
    found = with_full(own)
    if own is not stage:
        found.setdefault("full", stage)
    if wanted == "full" and "full" not in found and (lacking := without_full(own)):
        raise UserError(f"--attention: given full, but {lacking}; allowed: own, or kind full by attention.default=full")
    if wanted == "both":
        return found
    name = "full" if wanted == "full" and "full" in found else name_of(own)
    return {name: found[name]}


class EvaluationStoppedError(Exception):
    """The run was asked to stop while an evaluation ran. This is no fault: the run saves and ends in order."""


def never_stops() -> None:
    """Does nothing: `EvaluationContext.between_batches` outside training."""


def untracked(items: Sequence[int], what: str) -> Iterable[int]:
    """The items, without showing progress."""
    return items


@dataclass(frozen=True)
class EvaluationSetting:
    """Facts of a run that an evaluation of one of its stages may know, in addition to its own options.

    `resolve.evaluations.evaluation_settings` makes one for each stage. They are known before any rank exists: options
    are checked against them, and an evaluation is constructed from them.
    """

    stage: Stage
    model: ModelConfig
    seed: int
    """Seed of the run. Evaluations may have another seed for their samples among their options."""
    validation: tuple[SourceConfig, ...]
    """Corpora of held-out text, `data.validation`; may be none."""
    tokenizer: str | None
    """Path of `data.tokenizer`; None if the recipe names none."""
    every: int
    """Optimizer steps between evaluations whose options have no `every`."""
    sequences: int
    """Validation sequences, `evaluation.sequences`."""
    trained_length: int
    """Tokens of the longest sequences that the weights have been trained on by the end of the stage."""
    longest_length: int
    """Tokens of the longest sequences of any stage of the recipe."""
    tp: int
    """Ranks that share each layer's heads."""
    pp: int
    """Ranks of a pipeline, which hold different layers."""

    def validation_data(self, sequences: int) -> StageData:
        """Sequences of the stage's length from the corpora of held-out text. Raises DataError for damaged corpora."""
        return StageData(self.validation, self.stage.seq_len, sequences, self.seed, {}, self.model.vocab_size)


@dataclass(frozen=True)
class EvaluationContext:
    """Objects that an evaluation works with on every rank: model, this rank's part of the data, attentions to try."""

    model: Transformer
    """Sharded, with the stage's RoPE and engines."""
    stage: Stage
    data_shard: DataShard
    device: torch.device
    attentions: Mapping[str, Layers] = field(default_factory=dict)
    """Attention of every layer, by a name for people; at least one when an evaluation runs."""
    between_batches: Callable[[], None] = never_stops
    """Called by every evaluation before each forward pass, on all ranks together. Raises EvaluationStoppedError on all
    of them when the run is asked to stop."""
    track: Callable[[Sequence[int], str], Iterable[int]] = untracked
    """Shows progress through a loop over the first argument, which the second one names."""

    @property
    def own(self) -> str:
        """Name of the attention that numbers are about: the stage's own if it is tried, otherwise the first."""
        name = name_of(self.stage.attention)
        return name if name in self.attentions else next(iter(self.attentions))

    def passes(self, count: int, what: str) -> Iterator[tuple[int, bool]]:
        """Yield, for each forward pass, the number of this rank's sequence out of `count`, and whether it counts: ranks
        without one left repeat the last, as collectives need every rank. `what` names the loop for people."""
        shard = self.data_shard
        for first in self.track(range(0, count, shard.dp_size), what):
            self.between_batches()
            index = first + shard.dp_rank
            yield min(index, count - 1), index < count

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
    """Findings of one evaluation, equal on every rank."""

    numbers: dict[str, float]
    """Numbers about the attention `own`, by name, for telemetry and for `until`."""
    message: str
    """One line for the log."""
    table: list[str]
    """Lines that `moba-train eval` prints: all attentions side by side."""
    data: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, as JSON values, for the report."""


class Evaluation(ABC, Generic[AnyOptions]):
    """One evaluation of one stage. Constructed and called on all ranks together."""

    name: ClassVar[str]
    """Type of its records in metrics.jsonl, and its key in evaluation.json."""
    data_name: ClassVar[str] = ""
    """Field of its data in metrics.jsonl, if one of its numbers is called `name`; begins with `name`, by which the
    report finds it. Empty: `name`."""
    Options: ClassVar[type[Section] | None] = None
    """Its section in YAML, `evaluation.NAME`, which asks for it. None: held-out text asks for it."""
    key: ClassVar[str]
    """YAML key that asks for it; by default that of its section."""
    numbers: ClassVar[frozenset[str]]
    """Names of the numbers that it gives in every stage."""
    numbers_against_full: ClassVar[frozenset[str]] = frozenset()
    """Names of the numbers that it gives if full attention is tried in addition to the stage's own."""
    in_pipelines: ClassVar[bool] = True
    """False: ranks of a pipeline cannot run it while they train."""

    every: int
    """Optimizer steps between evaluations while the stage trains: its own `every`, or the recipe's."""
    compare_with_full: bool = False
    """True if the recipe also asks for full attention on the same weights, in stages with other layers: `attention:
    both`."""
    missing: str = ""
    """Sentence about the data that this stage lacks to be evaluated; empty: it lacks nothing."""

    @abstractmethod
    def __init__(self, options: AnyOptions, setting: EvaluationSetting) -> None:
        """Open the data for `setting.stage`. Raises DataError when a corpus is damaged."""
        self._options = options
        self.every = getattr(options, "every", None) or setting.every
        self.compare_with_full = getattr(options, "attention", None) == "both"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.Options is not None:
            cls.key = f"evaluation.{cls.name}"

    @classmethod
    def default_options(cls, setting: EvaluationSetting) -> Section | None:
        """Options that fit `setting.stage`, for `moba-train eval --tasks` if the recipe has none. To be defined by a
        class whose section has keys without defaults."""
        return None if cls.Options is None else cls.Options()

    @classmethod
    def problems(cls, options: AnyOptions, setting: EvaluationSetting) -> Iterator[str]:
        """Problems of the options in `setting.stage`, each named by its key. Reads no file."""
        yield from ()

    @classmethod
    def pipeline_problem(cls, options: AnyOptions) -> tuple[str, str] | None:
        """Key and value that a pipeline cannot do while it trains, and the advice what to set; None: it can do all."""
        return None if cls.in_pipelines else (f"{cls.key}: given", "remove it, and run `moba-train eval`")

    @classmethod
    def data_problems(cls, options: AnyOptions, setting: EvaluationSetting) -> Iterator[str]:
        """Reasons why the corpora do not give all numbers in `setting.stage`, so that `until` could not rely on them.

        Reads indices, no tokens. Raises DataError when a corpus is damaged.
        """
        yield from ()

    @classmethod  # optional, not abstract
    def check_samples(cls, options: AnyOptions, setting: EvaluationSetting) -> None:
        """Raise DataError, with the key to change, when a sample that `run` needs in `setting.stage` cannot be made of
        the run's files. Asked before training, because it would end the run at the stage's first evaluation."""

    @classmethod
    def sequences_per_pass(cls, stage: Stage) -> int:
        """Number of sequences of `stage.seq_len` tokens in one forward pass of a rank; one unless overridden."""
        return 1

    def due(self, step: int, stage: Stage) -> bool:
        """True if it runs after `step`: at multiples of `every`, and when the stage's tokens and the stage end."""
        return step % self.every == 0 or step in (stage.planned_end_step, stage.end_step)

    @abstractmethod
    def run(self, context: EvaluationContext) -> EvaluationResult:
        """Evaluate the model with each of the context's attentions. Called on all ranks together.

        Numbers are equal on every rank and, up to rounding, for every parallel layout. Calls the context's
        `between_batches` before each forward pass, and leaves its exceptions alone.
        """


def finite(value: Any) -> Any:
    """`value`, in which null stands for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
