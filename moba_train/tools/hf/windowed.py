"""Families whose window layers and full layers have rotary embeddings of their own."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moba_train.config.explain import given
from moba_train.config.model import LayerRope, ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.convert.hf_export import hf_rope
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.rope import read_rope

TYPES = ("full_attention", "sliding_attention")


class Windowed(Family):
    """Windows in most layers, all tokens in the others, and a rotary embedding for each of the two."""

    windows = True
    heads_divide_width = False
    full_every: ClassVar[int]
    """Layers of which one is full, the last, where the config does not say."""

    def every(self, config: Mapping[str, Any]) -> int:
        """Layers of which one is full, the last, where the config does not say which."""
        return self.full_every

    def window_theta(self, config: Mapping[str, Any]) -> Any:
        """Base of the window layers' frequencies in a config of transformers 4."""
        return config["rope_theta"]

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers but each `every`th, unless the config says which."""
        found = config.get("layer_types")
        if found is not None:
            return found if isinstance(found, list) else [found]
        every = self.every(config)
        return [TYPES[(layer + 1) % every != 0] for layer in range(config["num_hidden_layers"])]

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
        own = {"rope_theta": self.window_theta(config)} | window_section
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
        by_type = {name: _section(rope) for name, rope in zip(TYPES, (full, window), strict=True)}
        return super().written(model, attention) | hf_rope(full) | {"rope_parameters": by_type}


def _section(rope: LayerRope) -> dict[str, Any]:
    found = hf_rope(rope)
    return {"rope_type": "default", "rope_theta": found["rope_theta"], **(found["rope_scaling"] or {})}
