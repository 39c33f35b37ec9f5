"""SmolLM3: Llama with layers without positions."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.layers import layer_ids
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import Family


class SmolLM3(Family):
    """SmolLM3 3B: every fourth layer has no rotary embedding."""

    architecture = "SmolLM3ForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }
    fixed = {key: value for key, value in Family.fixed.items() if key != "use_sliding_window"}
    windows = True
    heads_divide_width = False
    others = frozenset({"no_rope_layers", "use_sliding_window", "max_window_layers"})

    def _turning(self, config: Mapping[str, Any]) -> list[Any]:
        """1 for each layer with a rotary embedding, 0 for the others."""
        interval = config["no_rope_layer_interval"]
        layers = config["num_hidden_layers"]
        if not isinstance(interval, int) or interval < 1:
            raise CheckpointError(f"no_rope_layer_interval is {given(interval)}, allowed: integer >= 1")
        found = config.get("no_rope_layers")
        if found is None:
            return [int((layer + 1) % interval != 0) for layer in range(layers)]
        if not isinstance(found, list) or len(found) < layers:
            raise CheckpointError(f"no_rope_layers is {given(found)}, allowed: a list of {layers} numbers, 0 or 1")
        return found[:layers]

    def usual_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers without positions."""
        return ["full_attention" if turns else "sliding_attention" for turns in self._turning(config)]

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """No windows without `use_sliding_window`."""
        windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
        types = super().layer_types(config)
        return types if windows else ["full_attention" if kind == "sliding_attention" else kind for kind in types]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With `nope` in the layers without positions, as a pattern if there is one."""
        found = super().values(config)
        without = {layer for layer, turns in enumerate(self._turning(config)) if not turns}
        layers = config["num_hidden_layers"]
        patterns: list[str | int] = [f"every:{count}" for count in range(1, layers + 1)]
        fitting = [pattern for pattern in patterns if layer_ids(str(pattern), layers) == without]
        overrides = {key: {"kind": "nope"} for key in fitting[:1] or sorted(without)}
        rope = found["rope"].model_dump(exclude_unset=True) | {"overrides": overrides}
        return found | {"rope": rope}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`no_rope_layers`, and windows if there are any."""
        turning = [int(rope.kind != "nope") for rope in model.rope.by_layer(model.layers)]
        return super().written(model, attention) | {
            "no_rope_layers": turning,
            "use_sliding_window": any(map(bool, attention)),
        }
