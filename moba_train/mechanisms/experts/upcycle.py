"""Upcycling (Komatsuzaki et al. 2022, arXiv:2212.05055): a mixture of experts from a dense model.

Each expert is a copy of the layer's feed-forward, and the router is drawn at random. A token's weights add up to 1, so
the model computes what the dense one does, up to rounding, until training makes the experts differ.
"""

from collections.abc import Callable

import torch
from pydantic import ValidationError
from torch import Tensor

from moba_train.config.explain import explain
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.model.build import drawn_normal

_EXPERTS = ".feed_forward.experts."


def upcycled(model: ModelConfig, experts: int, active: int) -> ModelConfig:
    """The shape with experts in every layer. Raises CheckpointError if that cannot be."""
    if model.given_members:
        raise CheckpointError(f"--experts: given {experts}, but the model has experts; allowed: a dense model")
    if model.activation != "silu":
        raise CheckpointError(
            f"--experts: given {experts}, but the model's activation is {model.activation!r}; allowed: models with "
            "SwiGLU, which is what experts compute"
        )
    section = {"experts": experts, "active": active, "intermediate_size": model.intermediate_size}
    try:
        return ModelConfig.model_validate(model.model_dump() | {"moe": section})
    except ValidationError as error:
        raise CheckpointError(f"--experts, --active: {'; '.join(explain(error, ModelConfig))}") from None


def upcycled_weight(name: str, shape: tuple[int, ...], model: ModelConfig, dense: Callable[[str], Tensor]) -> Tensor:
    """A weight of the upcycled model, float32; `dense` gives one of the dense model by name."""
    if name.endswith(".router.weight"):
        return drawn_normal(torch.empty(shape), model.init_std, name, seed=0)
    if _EXPERTS in name:
        return dense(name.replace(_EXPERTS, ".feed_forward.")).float().expand(shape).contiguous()
    return dense(name).float()
