"""Qwen3-Next: three layers with Gated DeltaNet, then one with gated attention, and experts with a shared one.

A linear layer's projections of q, k, v and the gate are one matrix, the rows of a head of keys after those of the one
before, and its convolutions one tensor; in a full layer queries and gates alternate head by head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.experts import experts_of
from moba_train.tools.hf.family import Fused
from moba_train.tools.hf.qwen3_moe import Qwen3Moe

_GDN = "attention.gdn."
_SHARED = "shared_expert_intermediate_size"
_KEYS = {"keys": "linear_num_key_heads", "values": "linear_num_value_heads", "width": "linear_key_head_dim"}
_TYPES = ("linear_attention", "full_attention")


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next, such as 80B-A3B, without the layers that predict further tokens."""

    architecture = "Qwen3NextForCausalLM"
    defaults = Qwen3Moe.defaults | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        _SHARED: 512,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "full_attention_interval": 4,
    }
    model = {"qk_norm": True, "centered_norms": True, "gate_layers": "all", "output_gate": "channel"}
    fixed = Qwen3Moe.fixed | {"linear_conv_kernel_dim": 4}
    others = Qwen3Moe.others | {"partial_rotary_factor"}
    turning = 0.25
    left_aside = ("mtp.",)
    names = Qwen3Moe.names | {
        "attention.output_gate": "self_attn.q_proj",
        "feed_forward.shared": "mlp.shared_expert",
        "feed_forward.shared_gate": "mlp.shared_expert_gate",
        **{f"feed_forward.shared.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        **{f"{_GDN}{part}_proj": "linear_attn.in_proj_qkvz" for part in "qkv"},
        f"{_GDN}delta.gate": "linear_attn.in_proj_qkvz",
        f"{_GDN}delta.beta": "linear_attn.in_proj_ba",
        f"{_GDN}delta.decay": "linear_attn.in_proj_ba",
        **{f"{_GDN}delta.{part}_conv": "linear_attn.conv1d" for part in "qkv"},
        f"{_GDN}delta.A_log": "linear_attn.A_log",
        f"{_GDN}delta.dt_bias": "linear_attn.dt_bias",
        f"{_GDN}delta.norm": "linear_attn.norm",
        f"{_GDN}o_proj": "linear_attn.out_proj",
    }
    fused = {
        "self_attn.q_proj.weight": Fused(groups="num_attention_heads"),
        "linear_attn.in_proj_qkvz.weight": Fused(groups="linear_num_key_heads"),
        "linear_attn.in_proj_ba.weight": Fused(groups="linear_num_key_heads"),
        "linear_attn.conv1d.weight": Fused(single=True),
    }

    def usual_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Full attention in every fourth layer, or what a key of its own says."""
        every = config["full_attention_interval"]
        if type(every) is not int or every < 1:
            raise CheckpointError(f"full_attention_interval is {given(every)}, allowed: integer >= 1")
        return [_TYPES[(layer + 1) % every == 0] for layer in range(config["num_hidden_layers"])]

    def attention(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Gated DeltaNet in linear layers."""
        types = self.layer_types(config)
        if config["linear_value_head_dim"] != config["linear_key_head_dim"]:
            value = given(config["linear_value_head_dim"])
            raise CheckpointError(f"linear_value_head_dim is {value}, allowed: that of linear_key_head_dim")
        plain = ["full_attention" if kind == _TYPES[0] else kind for kind in types]
        super().attention(dict(config) | {"layer_types": plain})
        heads = {ours: config[theirs] for ours, theirs in _KEYS.items()}
        return [{"kind": "gdn", "heads": heads} if kind == _TYPES[0] else {} for kind in types]

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the shared expert and the linear layers."""
        found = super().values(config)
        width = config["moe_intermediate_size"]
        if type(shared := config[_SHARED]) is not int or shared < 1 or shared % width:
            raise CheckpointError(f"{_SHARED} is {given(shared)}, allowed: multiples of moe_intermediate_size, {width}")
        moe = found["moe"].model_copy(update={"shared": shared // width, "shared_gate": True})
        bare = [layer for layer, entry in enumerate(self.attention(config)) if entry]
        return found | {"moe": moe, "bare_layers": bare or "none"}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the heads of linear layers, `partial_rotary_factor` and the shared expert."""
        moe = experts_of(model)
        heads = next((entry["heads"] for entry in attention if entry.get("kind") == "gdn"), None)
        linear = {} if heads is None else {theirs: heads[ours] for ours, theirs in _KEYS.items()}
        return super().written(model, attention) | {
            "layer_types": [_TYPES[not model.is_bare(layer)] for layer in range(model.layers)],
            "partial_rotary_factor": model.rope.fraction,
            _SHARED: moe.shared * moe.intermediate_size,
            **linear,
            **({"linear_value_head_dim": heads["width"]} if heads is not None else {}),
        }
