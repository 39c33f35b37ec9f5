"""Families with one window, in all layers or in those that `layer_types` names: Mistral, Ministral, Phi."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.rope import ROPE_SECTIONS


class Ministral(Family):
    """Ministral 8B: windows layer by layer."""

    architecture = "MinistralForCausalLM"
    defaults = Family.defaults | {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    windows = True
    heads_divide_width = False

    def usual_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Windows in all layers, if there is a `sliding_window`."""
        kind = "full_attention" if config.get("sliding_window") is None else "sliding_attention"
        return [kind] * config["num_hidden_layers"]


class Mistral(Ministral):
    """Mistral 7B, Nemo, Small; with `layer_types` it is a Ministral."""

    architecture = "MistralForCausalLM"

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A window in all layers, or in none."""
        found = super().written(model, attention) | {"sliding_window": attention[0].get("window")}
        return {key: value for key, value in found.items() if key != "layer_types"}


class OneWindow(Mistral):
    """Families that go by `sliding_window` alone."""

    def layer_types(self, config: Mapping[str, Any]) -> list[Any]:
        """Those of no `layer_types`."""
        return self.usual_types(config)


class Phi3(OneWindow):
    """Phi-3, Phi-3.5 and Phi-4, also with longrope and partial RoPE (Phi-4-mini)."""

    architecture = "Phi3ForCausalLM"
    defaults = Family.defaults | {
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    }
    fixed = Family.fixed | {"resid_pdrop": 0, "embd_pdrop": 0}
    names = Family.names | {
        **{f"attention.{part}_proj": "self_attn.qkv_proj" for part in "qkv"},
        **{f"feed_forward.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")},
    }
    turning = 1.0
    others = frozenset({"partial_rotary_factor"})

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses rotary embeddings other than the ordinary one and longrope."""
        found = super().values(_renamed(config))
        if (kind := found["rope"].kind) not in ("none", "longrope"):
            raise CheckpointError(f"rope_type: given that of {kind}, allowed in this family: default, longrope")
        return found

    def unread(self, config: Mapping[str, Any]) -> list[str]:
        """With longrope by its name."""
        return super().unread(_renamed(config))

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`partial_rotary_factor` where transformers 4 and 5 read it, and a section of longrope as 4 asks for it: of
        three keys, without the trained length."""
        found = super().written(model, attention) | {"partial_rotary_factor": model.rope.fraction}
        if model.rope.kind != "longrope":
            return found
        keys = {"type": "longrope", "short_factor": model.rope.short_factors, "long_factor": model.rope.long_factors}
        return found | {"rope_scaling": keys, "original_max_position_embeddings": model.rope.original_seq_len}


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, in whose sections of the embedding longrope has its name where it has an older one."""
    found = dict(config)
    for key in ROPE_SECTIONS:
        section = config.get(key)
        if isinstance(section, dict) and section.get("rope_type", section.get("type")) in ("su", "yarn"):
            found[key] = {**section, "type": "longrope", "rope_type": "longrope"}
    return found
