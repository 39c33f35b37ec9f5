"""Mistral and Ministral: Llama with a window in all layers, or in those that `layer_types` names."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.model import ModelConfig
from moba_train.tools.hf.family import Family


class Ministral(Family):
    """Ministral 8B: windows layer by layer."""

    architecture = "MinistralForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    windows = True
    heads_divide_width = False

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers, if there is a `sliding_window`, unless the config says which."""
        kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
        found = config.get("layer_types") or [kind] * config["num_hidden_layers"]
        return super().layer_types(dict(config) | {"layer_types": found})


class Mistral(Ministral):
    """Mistral 7B, Nemo, Small; with `layer_types` it is a Ministral."""

    architecture = "MistralForCausalLM"

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A window in all layers, or in none."""
        found = super().written(model, attention) | {"sliding_window": attention[0].get("window")}
        return {key: value for key, value in found.items() if key != "layer_types"}


class OneWindow(Mistral):
    """Families that go by `sliding_window` alone."""

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers, if there is a `sliding_window`."""
        return super().layer_types(dict(config) | {"layer_types": None})
