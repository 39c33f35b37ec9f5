"""Gemma 3, text: norms on both sides, GeGLU, scaled embeddings, windows in five of six layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import OF_ALL, Family
from moba_train.tools.hf.windowed import Windowed

NAMES = Family.names | {
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}


def factors(config: Mapping[str, Any]) -> dict[str, float]:
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
    names = NAMES
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
        return super().values(config) | factors(config)

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Gemma's own names."""
        scale = model.attention_scale or model.head_width**-0.5
        found = super().written(model, attention) | {"hidden_activation": "gelu_pytorch_tanh"}
        del found["hidden_act"]
        local = found["rope_parameters"]["sliding_attention"]["rope_theta"]
        return found | {"query_pre_attn_scalar": round(scale**-2), "rope_local_base_freq": local}
