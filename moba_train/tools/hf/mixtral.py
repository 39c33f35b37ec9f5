"""Mixtral of Mistral AI: Mistral with experts, each matrix of each a tensor; ours are stacks of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.model import ModelConfig
from moba_train.tools.hf.experts import LOSS, experts_of, read_experts, written_router
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.mistral import OneWindow


class Mixtral(OneWindow):
    """Mixtral 8x7B and 8x22B: experts in all layers, Mistral's window if any."""

    architecture = "MixtralForCausalLM"
    defaults = OneWindow.defaults | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        LOSS: 0.001,
    }
    fixed = Family.fixed | {"router_jitter_noise": 0}
    others = frozenset({"output_router_logits"})
    names = OneWindow.names | {
        "feed_forward.router": "block_sparse_moe.gate",
        "feed_forward.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
        "feed_forward.experts.up_proj": "block_sparse_moe.experts.{}.w3",
        "feed_forward.experts.down_proj": "block_sparse_moe.experts.{}.w2",
    }

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With `model.moe`."""
        keys = {"experts": "num_local_experts", "active": "num_experts_per_tok"}
        return super().values(config) | {"moe": read_experts(config, keys | {"intermediate_size": "intermediate_size"})}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the keys of experts, whose width is `intermediate_size`."""
        moe = experts_of(model)
        return super().written(model, attention) | {
            "num_local_experts": moe.experts,
            "intermediate_size": moe.intermediate_size,
            **written_router(moe),
        }
