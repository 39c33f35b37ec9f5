"""Granite 3 of IBM: Llama with four factors."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.model import ModelConfig
from moba_train.tools.hf.family import Family

_FACTORS = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}


class Granite(Family):
    """Dense Granite models."""

    architecture = "GraniteForCausalLM"
    same = Family.same | _FACTORS
    defaults = Family.defaults | dict.fromkeys(_FACTORS.values(), 1.0)
    heads_divide_width = False

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The factor on scores also where it is the usual one, which is not transformers' default."""
        scale = model.attention_scale or model.head_width**-0.5
        return super().written(model, attention) | {"attention_multiplier": scale}
