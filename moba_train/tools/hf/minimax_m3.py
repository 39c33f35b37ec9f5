"""MiniMax-M3's text model (arXiv:2606.13392) without experts: layers of the kind `msa`, and clamped feed-forwards.

An export takes it where it is asked for (`convert moba-to-hf --as`). Published weights have experts in all layers but
the first, and are refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import OF_ALL, Family

_SPARSE = "minimax_m3_sparse"
_INDEX = {"index_n_heads": "kv_heads", "index_head_dim": "head_dim"}


class MiniMaxM3(Family):
    """Dense models of MiniMax-M3's architecture."""

    architecture = "MiniMaxM3VLForCausalLM"
    asked_for = True
    same = Family.same | {"intermediate_size": "dense_intermediate_size"}
    defaults = Family.defaults | {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_theta": 5_000_000.0,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
    }
    model = {"qk_norm": True, "centered_norms": True, "activation": "clamped"}
    fixed = OF_ALL | {
        **{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "index_local_blocks": 1},
        "sparse_attention_config": None,  # an older form of the keys index_*
    }
    heads_divide_width = False
    turning = 1.0
    others = frozenset(
        {
            *("hidden_act", "rotary_dim", "partial_rotary_factor", "mlp_layer_types", "intermediate_size"),
            *("num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "routed_scaling_factor"),
            *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        }
    )
    names = Family.names | {f"feed_forward.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")}

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses layers with experts, which are those not named."""
        layers = config["num_hidden_layers"]
        if config.get("mlp_layer_types") != ["dense"] * layers:
            raise CheckpointError(
                f"mlp_layer_types is {given(config.get('mlp_layer_types'))}, allowed: dense in all {layers} layers"
            )
        return super().values(config)

    def attention(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`msa` in the sparse layers."""
        found = self.layer_types(config)
        full = super().attention(
            dict(config) | {"layer_types": ["full_attention" if name == _SPARSE else name for name in found]}
        )
        if _SPARSE not in found:
            return full
        for key, needed in _INDEX.items():
            wanted = config["head_dim" if needed == "head_dim" else "num_key_value_heads"]
            if config[key] != wanted:
                raise CheckpointError(f"{key} is {given(config[key])}, allowed: {wanted}, as {needed}")
        sizes = {"block_size": config["index_block_size"], "topk": config["index_topk_blocks"]}
        index = {"index_dim": config["index_head_dim"], "index_keys": "shared"}
        sparse = {"kind": "msa", "mode": "sparse", **sizes, **index}
        return [sparse if name == _SPARSE else {} for name in found]

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The index of the first sparse layer, for all of them."""
        sparse = next(filter(None, attention), {})
        found = {
            "hidden_act": "silu",
            "partial_rotary_factor": model.rope.fraction,
            "rotary_dim": int(model.rope.fraction * model.head_width),
            "mlp_layer_types": ["dense"] * model.layers,
            "layer_types": [_SPARSE if layer else "full_attention" for layer in attention],
            "index_n_heads": model.kv_heads,
            "index_head_dim": sparse.get("index_dim") or model.head_width,
            "num_local_experts": 1,
        }
        sizes = {"index_block_size": sparse.get("block_size"), "index_topk_blocks": sparse.get("topk")}
        return found | {key: value for key, value in sizes.items() if value is not None}

    def name(self, ours: str) -> str:
        """The index branch has a name of its own."""
        return super().name(ours).replace(".msa.", ".indexer.")
