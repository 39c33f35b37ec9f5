"""What each stage of a recipe comes to, once its defaults are filled in."""

from dataclasses import dataclass

from moba_train.config.attention import LayerAttention, merge_attention, resolve_layers
from moba_train.config.data import SourceConfig
from moba_train.config.model import RopeConfig
from moba_train.config.optim import ScheduleConfig
from moba_train.config.run import ContextParallelConfig, ParallelConfig
from moba_train.config.schema import RunConfig


@dataclass(frozen=True)
class Stage:
    """One stage, fully resolved. Steps and tokens count over the whole run; `end` values are exclusive."""

    index: int
    name: str
    seq_len: int
    batch_tokens: int
    micro_batch_size: int
    rope: RopeConfig
    attention: tuple[LayerAttention, ...]
    parallel: ParallelConfig
    sources: tuple[SourceConfig, ...]
    lr: float
    schedule: ScheduleConfig | None
    """The stage's own schedule, or None while the run's schedule goes on."""
    first_step: int
    end_step: int
    first_token: int
    end_token: int

    @property
    def steps(self) -> int:
        """Optimizer steps of this stage."""
        return self.end_step - self.first_step

    @property
    def batch_sequences(self) -> int:
        """Sequences in one optimizer step, over all ranks."""
        return self.batch_tokens // self.seq_len


def merge_rope(base: RopeConfig, over: RopeConfig | None) -> RopeConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win, so that `pi` keeps the model's `theta`."""
    return base if over is None else base.model_copy(update=over.model_dump(exclude_unset=True))


def merge_parallel(base: ParallelConfig, over: ContextParallelConfig | None) -> ParallelConfig:
    """`over` laid on `base`: only keys that `over` sets explicitly win."""
    return base if over is None else base.model_copy(update=over.model_dump(exclude_unset=True))


def resolve_stages(config: RunConfig) -> tuple[Stage, ...]:
    """All stages of a validated recipe, in order. Raises ConfigError as `resolve_layers` does."""
    stages: list[Stage] = []
    step = token = 0
    for index, stage in enumerate(config.stages):
        batch_tokens = stage.batch_tokens or config.batch_tokens
        steps = -(-stage.tokens // batch_tokens)
        own_schedule = stage.schedule or (config.optim.schedule if stage.lr is not None else None)
        stages.append(
            Stage(
                index=index,
                name=stage.name,
                seq_len=stage.seq_len,
                batch_tokens=batch_tokens,
                micro_batch_size=stage.micro_batch_size or config.micro_batch_size,
                rope=merge_rope(config.model.rope, stage.rope),
                attention=resolve_layers(merge_attention(config.attention, stage.attention), config.model.layers),
                parallel=merge_parallel(config.parallel, stage.parallel),
                sources=tuple(stage.train or config.data.train),
                lr=stage.lr or config.optim.lr,
                schedule=own_schedule,
                first_step=step,
                end_step=step + steps,
                first_token=token,
                end_token=token + steps * batch_tokens,
            )
        )
        step += steps
        token += steps * batch_tokens
    return tuple(stages)
