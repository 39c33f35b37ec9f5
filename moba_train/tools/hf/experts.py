"""Experts in the config.json of the families that have them (mixtral.py, qwen3_moe.py)."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moba_train.config.explain import explain
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.experts.options import MoeOptions

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
