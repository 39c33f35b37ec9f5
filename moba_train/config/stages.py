"""The stages of a recipe with all their defaults filled in."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moba_train.config.attention import LayerAttention, merge_attention, resolve_layers
from moba_train.config.base import Section
from moba_train.config.data import SourceConfig
from moba_train.config.model import RopeConfig
from moba_train.config.optim import ScheduleConfig
from moba_train.config.parallel import ContextParallelConfig, ParallelConfig
from moba_train.config.schema import RunConfig, UntilConfig

ALL_PARAMETERS = ("*",)
"""`trainable` of a stage that trains every parameter."""

RECIPE_KEYS = {"train": "data.train", "lr": "optim.lr", "schedule": "optim.schedule"}
"""Keys of the recipe that stages have under other names, by the stage's name."""


@dataclass(frozen=True)
class Stage:
    """One stage, fully resolved. Steps and tokens count over the whole run; `end` values are exclusive.

    A stage with an exit criterion (`until`) ends at `max_steps` as long as the criterion is not met: its end values and
    those of later stages are the latest possible ones.
    """

    index: int
    name: str
    seq_len: int
    batch_tokens: int
    micro_batch_size: int
    rope: RopeConfig
    attention: tuple[LayerAttention, ...]
    parallel: ParallelConfig
    sources: tuple[SourceConfig, ...]
    trainable: tuple[str, ...]
    """Glob patterns on the names of the parameters that this stage trains."""
    evaluate: bool
    """True if the recipe's evaluations run in this stage."""
    lr: float
    schedule: ScheduleConfig | None
    """The stage's own schedule, or None while the run's schedule goes on."""
    until: UntilConfig | None
    """The exit criterion; None: the stage ends with its `tokens`."""
    tokens: int
    """Tokens as the recipe gives them, before they are rounded up to whole steps."""
    planned_steps: int
    """Steps that `tokens` make. The learning rate knows no others, see optim/spec.py."""
    max_steps: int
    """Steps that `max_tokens` make with an exit criterion; else `planned_steps`."""
    first_step: int
    end_step: int
    first_token: int
    end_token: int
    planned_first_token: int
    """`first_token`, had every stage before ended with its planned steps."""
    objective: tuple[str, Section] | None = None
    """Name and options of what is minimised instead of the cross entropy."""
    own_keys: frozenset[str] = frozenset()
    """Keys of the recipe that the stage sets itself; it has the recipe's values of all others."""

    @property
    def steps(self) -> int:
        """Optimizer steps of this stage."""
        return self.end_step - self.first_step

    @property
    def planned_end_step(self) -> int:
        """The step after which `tokens` are consumed."""
        return self.first_step + self.planned_steps

    @property
    def planned_tokens(self) -> int:
        """Tokens of the planned steps."""
        return self.planned_steps * self.batch_tokens

    @property
    def batch_sequences(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.batch_tokens // self.seq_len

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention kind of each layer, first to last."""
        return tuple(layer.kind for layer in self.attention)

    def key(self, name: str) -> str:
        """Key of the recipe that sets the stage's `name`: its own, such as `stages[1].lr`, or else `optim.lr`."""
        return f"stages[{self.index}].{name}" if name in self.own_keys else RECIPE_KEYS.get(name, name)

    def tokens_after(self, step: int) -> int:
        """Tokens that the run has consumed after `step`, a step of this stage."""
        return self.first_token + (step - self.first_step) * self.batch_tokens

    def describe(self) -> str:
        """The stage in one line."""
        steps = f"{self.planned_steps} to {self.max_steps}" if self.until else str(self.steps)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(self.kinds).items())
        trained = "" if self.trainable == ALL_PARAMETERS else f", trains only {', '.join(self.trainable)}"
        trained += f", objective {self.objective[0]}" if self.objective else ""
        return (
            f"stage {self.name}: sequences of {self.seq_len} tokens, {self.batch_tokens} tokens per step, "
            f"{steps} steps, attention {kinds}{trained}"
        )


def merge_rope(base: RopeConfig, over: RopeConfig | None, seq_len: int) -> RopeConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win, so that `pi` keeps the model's `theta`. Of a
    stage with sequences of `seq_len`."""
    rope = base if over is None else base.model_copy(update=over.model_dump(exclude_unset=True))
    kinds = {rope.kind, *(own.get("kind") for own in rope.overrides.values() if own)}
    has_length = "longrope" not in kinds or rope.seq_len is not None
    return rope if has_length else rope.model_copy(update={"seq_len": seq_len})


def merge_parallel(base: ParallelConfig, over: ContextParallelConfig | None) -> ParallelConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win."""
    return base if over is None else base.model_copy(update=over.model_dump(exclude_unset=True))


def resolve_stages(config: RunConfig) -> tuple[Stage, ...]:
    """All stages of a recipe, in order, with their latest possible ends. Raises ConfigError as `resolve_layers` does.

    Only `resolve.run.resolve_unchecked` calls it: a resolved run holds its stages.
    """
    stages: list[Stage] = []
    planned_token = 0
    for index, stage in enumerate(config.stages):
        batch_tokens = stage.batch_tokens or config.batch_tokens
        planned = -(-stage.tokens // batch_tokens)
        own_schedule = stage.schedule or (config.optim.schedule if stage.lr is not None else None)
        stages.append(
            Stage(
                index=index,
                name=stage.name,
                seq_len=stage.seq_len,
                batch_tokens=batch_tokens,
                micro_batch_size=stage.micro_batch_size or config.micro_batch_size,
                rope=merge_rope(config.model.rope, stage.rope, stage.seq_len),
                attention=resolve_layers(merge_attention(config.attention, stage.attention), config.model.layers),
                parallel=merge_parallel(config.parallel, stage.parallel),
                sources=tuple(stage.train or config.data.train),
                trainable=ALL_PARAMETERS if stage.trainable == "all" else tuple(stage.trainable),
                evaluate=stage.evaluate,
                lr=stage.lr or config.optim.lr,
                schedule=own_schedule,
                until=stage.until,
                tokens=stage.tokens,
                planned_steps=planned,
                max_steps=-(-stage.until.max_tokens // batch_tokens) if stage.until else planned,
                first_step=0,
                end_step=0,
                first_token=0,
                end_token=0,
                planned_first_token=planned_token,
                objective=next(iter(stage.given_members.items()), None),
                own_keys=frozenset(name for name, value in stage if value is not None),
            )
        )
        planned_token += planned * batch_tokens
    return timed(stages, {})


def timed(stages: Sequence[Stage], exited_steps: Mapping[str, int]) -> tuple[Stage, ...]:
    """The stages with the steps and tokens at which they begin and end.

    exited_steps: steps that the stages took whose exit criterion was met, by the stage's name; others end at their
        latest.
    """
    found: list[Stage] = []
    step = token = 0
    for stage in stages:
        steps = exited_steps.get(stage.name, stage.max_steps)
        tokens = steps * stage.batch_tokens
        found.append(
            replace(stage, first_step=step, end_step=step + steps, first_token=token, end_token=token + tokens)
        )
        step += steps
        token += tokens
    return tuple(found)


def used_kinds(stages: Sequence[Stage]) -> set[tuple[int, str]]:
    """(layer, attention kind) of all layers in these stages."""
    return {(layer, kind) for stage in stages for layer, kind in enumerate(stage.kinds)}
