"""The section `model.moe` of a recipe."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moba_train.config.base import Section
from moba_train.config.model import LARGEST_WIDTH

MOST_EXPERTS = 1 << 16
_STRENGTHS = {"aux_loss": ("loss", "both"), "aux_loss_over": ("loss", "both"), "bias_update": ("bias", "both")}
"""Keys of the router, and the values of `balance` that use them."""


class RouterOptions(Section):
    """The choice of each token's experts, in float32 whatever the layers compute in."""

    not_here = {
        "dtype": "logits and scores are float32, whatever precision.compute is",
        "counted": "gone: tokens without loss are routed, but do not count",
    }

    score: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="function of the router's logits; softmax: Qwen3, Mixtral; sigmoid: DeepSeek-V3"
    )
    normalize: bool = Field(True, description="weights of a token's experts add up to 1 (times `scale`)")
    scale: float = Field(1.0, gt=0, description="factor of these weights")
    groups: int | None = Field(
        None, ge=2, description="experts are in this number of groups; null: no groups (DeepSeek-V3 has 8)"
    )
    active_groups: int | None = Field(None, ge=1, description="groups that a token's experts come from; with `groups`")
    balance: Literal["loss", "bias", "both", "none"] = Field(
        "loss",
        description="what keeps experts equally busy; loss: an auxiliary loss (`aux_loss`); bias: a bias of the choice "
        "alone, moved after each step (DeepSeek-V3, `bias_update`); both; none: nothing",
    )
    aux_loss: float = Field(0.001, gt=0, le=100, description="coefficient of the auxiliary loss, which is 1 in balance")
    aux_loss_over: Literal["sequence", "batch"] = Field(
        "sequence",
        description="tokens whose load the auxiliary loss of a token takes; sequence: those of its sequence, with all "
        "documents that are packed into it, on any layout; batch: those of the micro-batches that all ranks compute at "
        "the same time",
    )
    bias_update: float = Field(0.001, gt=0, le=1, description="change of each expert's bias after a step")
    z_loss: float = Field(
        0.0, ge=0, le=100, description="coefficient of the squared log-sum of the logits (Zoph et al. 2022)"
    )

    @property
    def has_loss(self) -> bool:
        """True if there is an auxiliary loss."""
        return self.balance in ("loss", "both")

    @property
    def has_bias(self) -> bool:
        """True if the choice has a bias."""
        return self.balance in ("bias", "both")

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        if (self.groups is None) != (self.active_groups is None):
            raise ValueError("groups and active_groups: one is given; allowed: both, or none")
        if self.groups is not None and self.active_groups is not None and self.active_groups >= self.groups:
            raise ValueError(f"active_groups: given {self.active_groups}; allowed: less than groups, {self.groups}")
        for key, users in _STRENGTHS.items():
            is_default = getattr(self, key) == type(self).model_fields[key].default  # which saved recipes name as well
            if not is_default and self.balance not in users:
                raise ValueError(
                    f"{key}: given with balance: {self.balance}, which does not use it; allowed: balance: "
                    f"{' or '.join(users)}"
                )
        return self


class MoeOptions(Section):
    """A mixture of experts in the layers of `layers`: each token passes through `active` of the `experts`, chosen by a
    router, and through all shared ones. No expert has a capacity, and no token is dropped."""

    experts: int = Field(ge=2, le=MOST_EXPERTS, description="experts of a layer that the router chooses from")
    active: int = Field(ge=1, description="experts that each token passes through; at most `experts`")
    intermediate_size: int = Field(ge=1, le=LARGEST_WIDTH, description="width of one expert, a SwiGLU")
    shared: int = Field(0, ge=0, le=MOST_EXPERTS, description="further experts of this width that every token passes")
    shared_gate: bool = Field(False, description="a sigmoid of the token is a factor on these (Qwen3-Next)")
    bias: bool = Field(False, description="biases in the router and in the experts (gpt-oss)")
    clamp: float | None = Field(
        None,
        gt=0,
        description="experts compute min(gate, clamp) sigmoid(1.702 gate) (up + 1), with up within +-clamp (gpt-oss "
        "has 7); null: SwiGLU",
    )
    layers: str | list[int] = Field(
        "all", description="layers with experts: all | none | last:N | first:N | every:N | list of layer ids"
    )
    router: RouterOptions = RouterOptions()

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate: given true with shared: 0; allowed: false, or shared >= 1")
        if self.active > self.experts:
            raise ValueError(f"active: given {self.active}; allowed: at most experts, {self.experts}")
        groups = self.router.groups
        active_groups = self.router.active_groups
        if groups is not None and active_groups is not None:
            if self.experts % groups:
                raise ValueError(f"router.groups: given {groups}, which does not divide experts {self.experts}")
            if self.active > (fitting := self.experts // groups * active_groups):
                raise ValueError(
                    f"router.active_groups: given {active_groups}, whose groups have {fitting} experts; allowed: at "
                    f"least active, {self.active}"
                )
        return self
