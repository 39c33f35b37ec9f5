"""Optimizer and learning-rate schedule."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from moba_train.config.base import OpenSection, Section, TokenBudget
from moba_train.config.explain import one_of
from moba_train.registry import ADAMW_KERNELS, ADAPTERS, OPTIMIZERS

Beta = Annotated[float, Field(ge=0, lt=1)]

MOST_RATE = 1_000_000
"""Largest learning rate and weight decay: far above any that trains, far below where float32 overflows."""


class ScheduleConfig(Section):
    """Learning rate as a function of the tokens consumed: warm-up, then one of four shapes.

    A step's rate is that of the tokens consumed when it is done: the first step's is not 0, and the last one's is the
    final rate. The run's schedule (`optim.schedule`) spans all stages; a stage's own spans that stage alone.
    """

    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "cosine", description="shape after the warm-up; wsd: constant, then linear over the last `decay_tokens`"
    )
    warmup_tokens: TokenBudget = Field(0, description="linear warm-up from 0 to `lr`")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="final learning rate / `lr` (linear, cosine, wsd)")
    decay_tokens: TokenBudget = Field(0, description="wsd: length of the linear decay at the end")


class AdaptersConfig(OpenSection):
    """Parameters that are trained instead of those of `init_from`, which stay as they are. Without any, all are
    trained."""

    members = ADAPTERS

    @property
    def given(self) -> tuple[str, Section] | None:
        """Name and options of the adapters; None: the model itself is trained."""
        return next(iter(self.given_members.items()), None)


class OptimConfig(OpenSection):
    """The optimizer, its learning rate and clipping. Weight decay applies to matrices, not to norms and biases."""

    members = OPTIMIZERS
    defaults_stand = True

    kind: str = Field(
        "adamw",
        description="any registered optimizer; adamw: AdamW (Loshchilov & Hutter 2019); muon: Muon (Jordan et al. "
        "2024) for the matrices of the blocks",
    )
    implementation: str = Field(
        "torch",
        description="what computes AdamW, torch or any registered one; apex, transformer_engine: their fused kernels; "
        "deepspeed_cpu: state and update in host memory, for models whose optimizer state does not fit on the GPU",
    )
    lr: float = Field(3e-4, gt=0, le=MOST_RATE, description="peak learning rate")
    lr_factors: dict[str, Annotated[float, Field(gt=0, le=MOST_RATE)]] = Field(
        {}, description="factors on `lr` of the parameters whose names match a glob pattern, the first that does"
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the running mean and of the running square")
    eps: float = Field(1e-8, ge=1e-30, le=1, description="added to the root of the running square")
    weight_decay: float = Field(
        0.1, ge=0, le=MOST_RATE, description="decoupled decay, times the learning rate, at each step"
    )
    clip_norm: float | None = Field(1.0, gt=0, description="global gradient norm is clipped to this; null: never")
    schedule: ScheduleConfig = ScheduleConfig()

    @field_validator("kind", "implementation")
    @classmethod
    def _is_registered(cls, name: str, info: ValidationInfo) -> str:
        return one_of(name, [*OPTIMIZERS] if info.field_name == "kind" else ["torch", *ADAMW_KERNELS])
