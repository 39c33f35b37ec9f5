"""Qwen3-MoE: Qwen3 with experts, each matrix of each a tensor; ours are stacks of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.layers import layer_ids
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.experts import LOSS, experts_of, read_experts, written_router
from moba_train.tools.hf.family import Qwen2, Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3-MoE, such as Qwen3-30B-A3B: experts in all layers or in some."""

    architecture = "Qwen3MoeForCausalLM"
    defaults = Qwen2.defaults | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        LOSS: 0.001,
    }
    others = Qwen3.others | {"num_local_experts", "output_router_logits"}
    names = Qwen3.names | {
        "feed_forward.router": "mlp.gate",
        **{f"feed_forward.experts.{part}_proj": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
    }

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With `model.moe`."""
        step = config["decoder_sparse_step"]
        dense = config["mlp_only_layers"]
        if type(step) is not int or step < 1:
            raise CheckpointError(f"decoder_sparse_step is {given(step)}, allowed: integer >= 1")
        if not isinstance(dense, list):
            raise CheckpointError(f"mlp_only_layers is {given(dense)}, allowed: list of integer")
        layers = range(config["num_hidden_layers"])
        sparse = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
        keys = {
            "experts": "num_local_experts" if "num_local_experts" in config else "num_experts",  # transformers 5, and 4
            "active": "num_experts_per_tok",
            "intermediate_size": "moe_intermediate_size",
            "router.normalize": "norm_topk_prob",
        }
        moe = read_experts(config, keys, "all" if len(sparse) == len(layers) else sparse)
        return super().values(config) | {"moe": moe}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the keys of experts."""
        moe = experts_of(model)
        return super().written(model, attention) | {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.intermediate_size,
            "norm_topk_prob": moe.router.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": sorted({*range(model.layers)} - layer_ids(moe.layers, model.layers)),
            **written_router(moe),
        }
