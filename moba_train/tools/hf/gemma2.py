"""Gemma 2: norms on both sides, GeGLU, scaled embeddings, windows in every other layer, capped scores and logits."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import OF_ALL, Family
from moba_train.tools.hf.gemma3 import NAMES, factors

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
    names = NAMES
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
        return super().values(config) | factors(config)

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gemma's own names."""
        scale = model.attention_scale or model.head_width**-0.5
        found = super().written(model, attention) | {"hidden_activation": "gelu_pytorch_tanh"}
        del found["hidden_act"]
        caps = [layer["cap"] for layer in attention if "cap" in layer]
        return found | {"query_pre_attn_scalar": round(scale**-2), _CAP: caps[0] if caps else None}
