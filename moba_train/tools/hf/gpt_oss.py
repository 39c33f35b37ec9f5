"""gpt-oss of OpenAI (arXiv:2508.10925): sinks, windows in every other layer, and experts with biases, clamped.

The matrices of all experts of a layer are one tensor, whose columns are those of gate and up by turns. Published
weights of experts are in MXFP4 (mxfp4.py); an export has them in 16 bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moba_train.config.model import ModelConfig
from moba_train.tools.convert.hf_export import rope_section
from moba_train.tools.hf.experts import LOSS, experts_of, read_experts, written_router
from moba_train.tools.hf.family import Family, Fused

_EXPERTS = "feed_forward.experts."
_KEYS = {
    "experts": "num_local_experts",
    "active": "num_experts_per_tok",
    "intermediate_size": "intermediate_size",
    "clamp": "swiglu_limit",
}


class GptOss(Family):
    """gpt-oss 20B and 120B."""

    architecture = "GptOssForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        LOSS: 0.001,
    }
    model = {"qkv_bias": True, "o_bias": True, "sink_layers": "all"}
    fixed = Family.fixed | {"attention_bias": True, "swiglu_alpha": 1.702}
    windows = True
    pattern = ("sliding_attention", "full_attention")
    heads_divide_width = False
    # The last two stand in OpenAI's files, and transformers reads neither.
    others = frozenset({"output_router_logits", "experts_per_token", "initial_context_length"})
    names = Family.names | {
        "attention.sink.weight": "self_attn.sinks",
        "feed_forward.router": "mlp.router",
        **{f"{_EXPERTS}{part}_proj.weight": "mlp.experts.gate_up_proj" for part in ("gate", "up")},
        **{f"{_EXPERTS}{part}_proj.bias": "mlp.experts.gate_up_proj_bias" for part in ("gate", "up")},
        f"{_EXPERTS}down_proj.weight": "mlp.experts.down_proj",
        f"{_EXPERTS}down_proj.bias": "mlp.experts.down_proj_bias",
    }
    fused = {
        "mlp.experts.gate_up_proj": Fused(1, "intermediate_size", transposed=True),
        "mlp.experts.gate_up_proj_bias": Fused(1, "intermediate_size"),
        "mlp.experts.down_proj": Fused(transposed=True),
    }

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With YaRN if the config has no section for the rotary embedding; an empty one is the ordinary embedding."""
        found = super().completed(config)
        if found.get("rope_parameters") is None and not found.get("rope_scaling"):
            yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            found["rope_parameters"] = yarn | {"original_max_position_embeddings": 4096}
        return found

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With `model.moe`. Weights in MXFP4 are no other model."""
        packed = config.get("quantization_config")
        if isinstance(packed, dict) and packed.get("quant_method") == "mxfp4":
            config = dict(config) | {"quantization_config": None}
        moe = read_experts(config, _KEYS).model_copy(update={"bias": True})
        return super().values(config) | {"moe": moe}

    def cautions(self, config: Mapping[str, Any]) -> Iterator[str]:
        """transformers 4 clamps at 7, whatever the config says."""
        if (limit := config["swiglu_limit"]) != self.defaults["swiglu_limit"]:
            yield f"transformers 4 does not read swiglu_limit, {limit:g}, and clamps at 7; use transformers 5"

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the keys of experts, and the rotary embedding also where it is the ordinary one, which is not
        transformers' default."""
        moe = experts_of(model)
        return super().written(model, attention) | {
            "attention_bias": True,
            "rope_parameters": rope_section(model.rope),
            **{theirs: getattr(moe, ours) for ours, theirs in _KEYS.items()},
            **written_router(moe),
        }
