"""Families with windows in most layers, whose rotary embeddings are their own: OLMo 3, and OLMo 2 next to it."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moba_train.config.explain import given
from moba_train.config.model import LayerRope, ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.convert.hf_export import hf_rope, rope_section
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.rope import read_rope

TYPES = ("full_attention", "sliding_attention")


class Windowed(Family):
    """Windows in most layers, all tokens in the others, and a rotary embedding for each of the two."""

    windows = True
    heads_divide_width = False
    window_theta: ClassVar[str] = "rope_theta"
    """Key with the base of the window layers' frequencies in a config of transformers 4."""

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The embedding of the full layers, and overrides where that of the window layers is another one."""
        types = self.layer_types(config)
        by_type = config.get("rope_parameters") or {}
        if not isinstance(by_type, dict) or not by_type.keys() <= {*TYPES}:
            raise CheckpointError(f"rope_parameters is {given(by_type)}, allowed: an object with {' and '.join(TYPES)}")
        # transformers 4 scales the full layers alone; 5 lays that over its own section.
        sections = {f"rope_parameters.{name}": by_type.get(name) or {} for name in TYPES}
        sections["rope_scaling"] = config.get("rope_scaling") or {}
        for key, section in sections.items():
            if not isinstance(section, dict):
                raise CheckpointError(f"{key} is {given(section)}, allowed: an object")
            if section.get("truncate") is False:  # transformers reads it for all layers alone
                raise CheckpointError(f"{key}.truncate is false, allowed in this family: true")
        full_section, window_section, scaling = sections.values()
        plain = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_parameters")}
        full = read_rope(plain | {"rope_parameters": full_section | scaling})
        own = {"rope_theta": config[self.window_theta]} | window_section
        window = read_rope(plain | {"rope_parameters": own})
        rope = full.model_dump(exclude_unset=True)
        if window != full and TYPES[1] in types:
            keys = {**LayerRope().model_dump(), **window.model_dump(exclude={"overrides"})}
            values = {key: value for key, value in keys.items() if getattr(full, key) != value}
            rope["overrides"] = {layer: values for layer, kind in enumerate(types) if kind == TYPES[1]}
        return super().values(plain) | {"rope": rope}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The embeddings as transformers 4 reads them, and as 5 does."""
        ropes = model.rope.by_layer(model.layers)
        windows = [rope for rope, layer in zip(ropes, attention, strict=True) if layer]
        window = windows[0] if windows else ropes[0]
        full = next((rope for rope, layer in zip(ropes, attention, strict=True) if not layer), model.rope)
        by_type = {name: rope_section(rope) for name, rope in zip(TYPES, (full, window), strict=True)}
        return super().written(model, attention) | hf_rope(full) | {"rope_parameters": by_type}


class Olmo2(Family):
    """OLMo 2: all layers attend to all tokens before."""

    architecture = "Olmo2ForCausalLM"
    defaults = Family.defaults | {"rms_norm_eps": 1e-5}
    model = {"norms": "post", "qk_norm": "all_heads"}
    names = {key: value for key, value in Family.names.items() if not key.endswith("_norm")} | {
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    }
    heads_divide_width = False


class Olmo3(Windowed):
    """OLMo 3: three of four layers have a window; others scale RoPE."""

    architecture = "Olmo3ForCausalLM"
    defaults = Olmo2.defaults | {"sliding_window": 4096, "rope_theta": 500_000.0}
    model = Olmo2.model
    names = Olmo2.names
    pattern = (TYPES[1], TYPES[1], TYPES[1], TYPES[0])
