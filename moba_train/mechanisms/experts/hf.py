"""Qwen3-MoE and Mixtral of Hugging Face: keys of config.json, and names of tensors.

A folder has a tensor for each matrix of each expert; ours are stacks of them. What these architectures lack (sigmoid
scores, groups, shared experts, biases of the choice that are not zero) is refused in an export.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from moba_train.config.base import Section
from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.experts.options import MoeOptions

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM"}
LIKE = {"qwen3_moe": "qwen3", "mixtral": "llama"}
"""Model types that differ from them in the feed-forward alone."""
_QWEN3 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "head_dim": None,
}
_MIXTRAL = {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}
DEFAULTS: dict[str, dict[str, Any]] = {"qwen3_moe": _QWEN3, "mixtral": _MIXTRAL}
"""Values that transformers gives to keys which a config.json leaves out, where they differ from those of `LIKE`."""

_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def section(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section `model.moe` of a model with this config.json, which leaves nothing out. Raises CheckpointError."""
    mixtral = config["model_type"] == "mixtral"
    found: dict[str, Any] = {
        "experts": config.get("num_local_experts", config.get("num_experts")),  # transformers 5 writes the first
        "active": config["num_experts_per_tok"],
        "intermediate_size": config["intermediate_size" if mixtral else "moe_intermediate_size"],
    }
    if coefficient := config["router_aux_loss_coef"]:
        found["router"] = {"aux_loss": coefficient}
    else:
        found["router"] = {"balance": "none"}
    if mixtral and config.get("sliding_window") is not None:
        raise CheckpointError(f"sliding_window is {given(config['sliding_window'])}, allowed: null")
    if not mixtral:
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"]
        if type(step) is not int or step < 1 or not isinstance(dense, list):
            raise CheckpointError(
                f"decoder_sparse_step is {step!r} and mlp_only_layers {dense!r}; allowed: an integer >= 1, and a list"
            )
        count = config["num_hidden_layers"]
        layers = [layer for layer in range(count) if layer not in dense and (layer + 1) % step == 0]
        found["router"]["normalize"] = config["norm_topk_prob"]
        found["layers"] = "all" if len(layers) == count else layers
    return found


def config(options: Section, model_type: str, layers: set[int], number: int) -> dict[str, Any]:
    """Keys of config.json for these options in these `layers` of a `number`. Raises CheckpointError for what the model
    type cannot be."""
    assert isinstance(options, MoeOptions)
    router = options.router
    mixtral = model_type == "mixtral"
    refused: dict[str, tuple[object, object]] = {
        "model.moe.shared": (options.shared, 0),
        "model.moe.router.score": (router.score, "softmax"),
        "model.moe.router.scale": (router.scale, 1),
        "model.moe.router.groups": (router.groups, None),
    }
    if mixtral:
        refused["model.moe.router.normalize"] = (router.normalize, True)
        refused["model.moe.layers"] = (options.layers if len(layers) < number else "all", "all")
    for key, (value, allowed) in refused.items():
        if value != allowed:
            raise CheckpointError(f"{key}: given {value!r}; allowed in an export as {model_type}: {allowed!r}")
    found: dict[str, Any] = {
        "num_experts_per_tok": options.active,
        "router_aux_loss_coef": router.aux_loss if router.has_loss else 0.0,
    }
    if mixtral:
        return found | {
            "num_local_experts": options.experts,
            "intermediate_size": options.intermediate_size,
            "sliding_window": None,
        }
    return found | {
        "num_experts": options.experts,
        "moe_intermediate_size": options.intermediate_size,
        "norm_topk_prob": router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(set(range(number)) - layers),
    }


def names(parameter: str, options: Section, model: ModelConfig) -> Iterator[str]:
    """Names inside the layer of the tensors that a parameter of the feed-forward consists of, in the order of the
    stack; none for the biases of the choice."""
    assert isinstance(options, MoeOptions)
    mixtral = not model.qk_norm
    part = "block_sparse_moe" if mixtral else "mlp"
    if parameter == "router.weight":
        yield f"{part}.gate.weight"
    elif parameter.startswith("experts."):
        projection = parameter.split(".")[1]
        theirs = _MIXTRAL_NAMES[projection] if mixtral else projection
        yield from (f"{part}.experts.{expert}.{theirs}.weight" for expert in range(options.experts))
    elif parameter != "bias":
        raise CheckpointError(f"feed_forward.{parameter}: no Hugging Face architecture has such a tensor")
