"""Optimizer and learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field

from moba_train.config.base import Section
from moba_train.config.quantities import TokenBudget

OptimizerKind = Literal["adamw"]
"""Names of the optimizers in `optim.registry`."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(Section):
    """Learning rate as a function of the tokens consumed: warm-up, then one of four shapes.

    The run's schedule (`optim.schedule`) spans all stages; a stage's own spans that stage alone.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="shape after the warm-up; wsd: constant, then linear over the last `decay_tokens`"
    )
    warmup_tokens: TokenBudget = Field(0, description="linear warm-up from 0 to `lr`")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate / `lr` (linear, cosine, wsd)")
    decay_tokens: TokenBudget = Field(0, description="wsd: length of the linear decay at the end")


class OptimConfig(Section):
    """The optimizer, its learning rate and clipping. Weight decay applies to matrices, not to norms and biases."""

    kind: OptimizerKind = Field("adamw", description="adamw: AdamW (Loshchilov & Hutter 2019)")
    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the running mean and of the running square")
    eps: float = Field(1e-8, gt=0, description="added to the root of the running square")
    weight_decay: float = Field(0.1, ge=0, description="decoupled decay, times the learning rate, at each step")
    clip_norm: float | None = Field(1.0, gt=0, description="global gradient norm is clipped to this; null: never")
    schedule: ScheduleConfig = ScheduleConfig()
