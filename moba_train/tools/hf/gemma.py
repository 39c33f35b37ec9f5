"""Gemma 2 and 3, text: norms on both sides, GeGLU, scaled embeddings, windows in every other layer or five of six."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import OF_ALL, Family
from moba_train.tools.hf.windowed import TYPES, Windowed


class Gemma(Family):
    """Gemma's norms on both sides, GeGLU and scaled embeddings."""

    defaults = Family.defaults | {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }
    model = {"norms": "both", "centered_norms": True, "activation": "gelu_tanh"}
    fixed = OF_ALL | {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False}
    names = Family.names | {
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    }
    windows = True
    heads_divide_width = True

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the factor on embeddings, which the width gives, and that on scores."""
        scalar = config["query_pre_attn_scalar"]
        if not isinstance(scalar, int | float) or not scalar > 0:
            raise CheckpointError(f"query_pre_attn_scalar is {given(scalar)}, allowed: number > 0")
        scales = {"embedding_scale": config["hidden_size"] ** 0.5, "attention_scale": scalar**-0.5}
        return super().values(config) | scales

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gemma's own names."""
        scale = model.attention_scale or model.head_width**-0.5
        found = super().written(model, attention) | {"hidden_activation": "gelu_pytorch_tanh"}
        del found["hidden_act"]
        return found | {"query_pre_attn_scalar": round(scale**-2)}


class Gemma3(Gemma, Windowed):
    """Gemma 3, the text model by itself."""

    architecture = "Gemma3ForCausalLM"
    defaults = Gemma.defaults | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    model = Gemma.model | {"qk_norm": True}
    fixed = Gemma.fixed | {"final_logit_softcapping": None, "attn_logit_softcapping": None}
    window_theta = "rope_local_base_freq"
    others = frozenset({"sliding_window_pattern", "_sliding_window_pattern", "cache_implementation"})

    def usual_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers but each sixth, or what a key of its own says."""
        every = config.get("sliding_window_pattern") or 6
        if type(every) is not int:
            raise CheckpointError(f"sliding_window_pattern is {given(every)}, allowed: integer")
        return [TYPES[(layer + 1) % every != 0] for layer in range(config["num_hidden_layers"])]

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the base of the window layers."""
        found = super().written(model, attention)
        return found | {"rope_local_base_freq": found["rope_parameters"]["sliding_attention"]["rope_theta"]}


_CAP = "attn_logit_softcapping"


class Gemma2(Gemma):
    """Gemma 2 2B, 9B and 27B."""

    architecture = "Gemma2ForCausalLM"
    same = Family.same | {"logits_cap": "final_logit_softcapping"}
    defaults = Gemma.defaults | {"final_logit_softcapping": 30.0, _CAP: 50.0}
    pattern = (TYPES[1], TYPES[0])
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

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the cap of the first layer that has one."""
        caps = [layer["cap"] for layer in attention if "cap" in layer]
        return super().written(model, attention) | {_CAP: caps[0] if caps else None}
