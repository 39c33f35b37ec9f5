"""Families with windows in most layers, such as OLMo 3 and Gemma 3, and those next to them."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moba_train.config.explain import given
from moba_train.config.model import LayerRope, ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.convert.hf_export import hf_rope
from moba_train.tools.hf.family import OF_ALL, Family
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


_OLMO_DEFAULTS = Family.defaults | {"rms_norm_eps": 1e-5}
_OLMO_NAMES = {key: value for key, value in Family.names.items() if not key.endswith("_norm")} | {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}
_OLMO_MODEL = {"norms": "post", "qk_norm": "all_heads"}


class Olmo2(Family):
    """OLMo 2: all layers attend to all tokens before."""

    architecture = "Olmo2ForCausalLM"
    defaults = _OLMO_DEFAULTS
    model = _OLMO_MODEL
    names = _OLMO_NAMES
    heads_divide_width = False


class Olmo3(Windowed):
    """OLMo 3: three of four layers have a window; others scale RoPE."""

    architecture = "Olmo3ForCausalLM"
    defaults = _OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0}
    model = _OLMO_MODEL
    names = _OLMO_NAMES
    full_every = 4


_GEMMA_NAMES = Family.names | {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}


def _gemma_factors(config: Mapping[str, Any]) -> dict[str, float]:
    """The factor on embeddings, and that on scores."""
    scalar = config["query_pre_attn_scalar"]
    if not isinstance(scalar, int | float) or not scalar > 0:
        raise CheckpointError(f"query_pre_attn_scalar is {given(scalar)}, allowed: number > 0")
    return {"embedding_scale": config["hidden_size"] ** 0.5, "attention_scale": scalar**-0.5}


class Gemma3(Windowed):
    """Gemma 3, the text model by itself."""

    architecture = "Gemma3ForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    model = {"norms": "both", "centered_norms": True, "qk_norm": True, "activation": "gelu_tanh"}
    fixed = OF_ALL | {
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    names = _GEMMA_NAMES
    heads_divide_width = True
    full_every = 6
    others = frozenset({"sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"})

    def every(self, config: Mapping[str, Any]) -> int:
        """A key of its own."""
        found = config.get("sliding_window_pattern") or self.full_every
        if type(found) is not int:
            raise CheckpointError(f"sliding_window_pattern is {given(found)}, allowed: integer")
        return found

    def window_theta(self, config: Mapping[str, Any]) -> Any:
        """A key of its own."""
        return config["rope_local_base_freq"]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the factor on embeddings, which the width gives, and that on scores."""
        return super().values(config) | _gemma_factors(config)

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gemma's own names."""
        scale = model.attention_scale or model.head_width**-0.5
        found = super().written(model, attention) | {"hidden_activation": "gelu_pytorch_tanh"}
        del found["hidden_act"]
        local = found["rope_parameters"]["sliding_attention"]["rope_theta"]
        return found | {"query_pre_attn_scalar": round(scale**-2), "rope_local_base_freq": local}


_CAP = "attn_logit_softcapping"


class Gemma2(Family):
    """Gemma 2 2B, 9B and 27B."""

    architecture = "Gemma2ForCausalLM"
    same = Family.same | {"logits_cap": "final_logit_softcapping"}
    defaults = Family.defaults | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        _CAP: 50.0,
    }
    model = {"norms": "both", "centered_norms": True, "activation": "gelu_tanh"}
    fixed = OF_ALL | {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
    names = _GEMMA_NAMES
    windows = True
    pattern = ("sliding_attention", "full_attention")
    others = frozenset({"hidden_act", "cache_implementation"})  # transformers goes by hidden_activation

    def attention(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Capped scores in every layer, if there is a cap."""
        cap = config[_CAP]
        found = super().attention(config)
        if cap is None:
            return found
        if not isinstance(cap, int | float) or not cap > 0:
            raise CheckpointError(f"{_CAP} is {given(cap)}, allowed: number > 0 or null")
        return [{"kind": "capped", "cap": float(cap), "window": layer.get("window")} for layer in found]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the factors on embeddings and scores."""
        return super().values(config) | _gemma_factors(config)

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gemma's own names."""
        scale = model.attention_scale or model.head_width**-0.5
        found = super().written(model, attention) | {"hidden_activation": "gelu_pytorch_tanh"}
        del found["hidden_act"]
        caps = [layer["cap"] for layer in attention if "cap" in layer]
        return found | {"query_pre_attn_scalar": round(scale**-2), _CAP: caps[0] if caps else None}
