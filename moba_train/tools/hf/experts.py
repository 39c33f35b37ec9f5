"""Experts in the config.json of the families that have them, and Mixtral, each matrix of whose experts is a tensor."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.tools.hf.family import Family
from moba_train.tools.hf.one_window import OneWindow

LOSS = "router_aux_loss_coef"


def read_experts(config: Mapping[str, Any], keys: Mapping[str, str], layers: str | list[int] = "all") -> MoeOptions:
    """Experts in these `layers`. keys: paths in `model.moe`, and keys of `config` with their values."""
    router = {"aux_loss": config[LOSS]} if config[LOSS] else {"balance": "none"}
    found: dict[str, Any] = {"layers": layers, "router": router}
    for path, key in keys.items():
        (router if path.startswith("router.") else found)[path.removeprefix("router.")] = config[key]
    try:
        return MoeOptions.model_validate(found)
    except ValidationError as error:
        names = {**keys, "router.aux_loss": LOSS}
        raise CheckpointError("; ".join(explain(error, MoeOptions, names))) from None


def experts_of(model: ModelConfig) -> MoeOptions:
    """Section `model.moe`. Raises CheckpointError for a model that is no mixture of experts."""
    found = model.given_members.get("moe")
    if not isinstance(found, MoeOptions):
        raise CheckpointError("model.moe is null, allowed: a section")
    return found


def written_router(moe: MoeOptions) -> dict[str, Any]:
    """Keys of config.json with equal names in these families."""
    return {"num_experts_per_tok": moe.active, LOSS: moe.router.aux_loss if moe.router.has_loss else 0.0}


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
