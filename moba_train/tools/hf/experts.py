"""Mixtures of experts: Qwen3-MoE and Mixtral. Their folders have a tensor for each matrix of each expert."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.tools.hf.family import Family, Qwen3

_COMMON = frozenset({"output_router_logits", "num_experts", "num_local_experts", "mlp_only_layers"})


def _options(model: ModelConfig) -> MoeOptions | None:
    found = model.given_feed_forwards.get("moe")
    return found if isinstance(found, MoeOptions) else None


def _router(config: Mapping[str, Any], normalize: Any) -> dict[str, Any]:
    """The section `model.moe.router`; the coefficient of the auxiliary loss may be 0."""
    coefficient = config["router_aux_loss_coef"]
    balance = {"aux_loss": coefficient} if coefficient else {"balance": "none"}
    return {"normalize": normalize, **balance}


def _coefficient(options: MoeOptions | None) -> float:
    return options.router.aux_loss if options and options.router.has_loss else 0.0


class Qwen3Moe(Qwen3):
    """Qwen3-MoE, as Qwen3-30B-A3B; layers may have a dense feed-forward."""

    architecture = "Qwen3MoeForCausalLM"
    defaults = Qwen3.defaults | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.001,
        "head_dim": None,
    }
    others = Qwen3.others | _COMMON

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the section `model.moe`."""
        step, dense = config["decoder_sparse_step"], config.get("mlp_only_layers") or []
        count = config["num_hidden_layers"]
        if type(step) is not int or step < 1 or not isinstance(dense, list):
            raise CheckpointError(
                f"decoder_sparse_step is {given(step)} and mlp_only_layers {given(dense)}; allowed: an integer >= 1, "
                "and a list"
            )
        layers = [layer for layer in range(count) if layer not in dense and (layer + 1) % step == 0]
        moe = {
            # Published files have the second; transformers 5 writes the first.
            "experts": config.get("num_local_experts", config.get("num_experts", 128)),
            "active": config["num_experts_per_tok"],
            "intermediate_size": config["moe_intermediate_size"],
            "layers": "all" if len(layers) == count else layers,
            "router": _router(config, config["norm_topk_prob"]),
        }
        return super().values(config) | {"moe": moe}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the experts, none of which a dense model has."""
        options = _options(model)
        found = super().written(model, attention)
        if options is None:
            return found | {"mlp_only_layers": list(range(model.layers))}
        return found | {
            "num_experts": options.experts,
            "num_experts_per_tok": options.active,
            "moe_intermediate_size": options.intermediate_size,
            "norm_topk_prob": options.router.normalize,
            "router_aux_loss_coef": _coefficient(options),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(model.layers) if not model.feed_forward(layer)],
        }

    def stack(self, ours: str, number: int) -> tuple[str, ...]:
        """`blocks.L.feed_forward.experts.gate_proj.weight` is `model.layers.L.mlp.experts.E.gate_proj.weight`."""
        _, found, rest = ours.partition(".feed_forward.experts.")
        return tuple(f"model.layers.{_layer(ours)}.mlp.experts.{expert}.{rest}" for expert in range(number) if found)

    def name(self, ours: str) -> str:
        """The router is `mlp.gate`."""
        return super().name(ours.replace(".feed_forward.router.", ".feed_forward.gate."))


class Mixtral(Family):
    """Mixtral 8x7B and 8x22B, of which the section's `intermediate_size` is that of an expert."""

    architecture = "MixtralForCausalLM"
    defaults = Family.defaults | {
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    }
    fixed = Family.fixed | {"sliding_window": None, "router_jitter_noise": 0.0}
    heads_divide_width = False
    others = _COMMON
    names = Family.names | {"feed_forward": "block_sparse_moe"}
    _MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the section `model.moe`."""
        moe = {
            "experts": config["num_local_experts"],
            "active": config["num_experts_per_tok"],
            "intermediate_size": config["intermediate_size"],
            "router": _router(config, True),
        }
        return super().values(config) | {"moe": moe}

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the experts."""
        options = _options(model)
        found = super().written(model, attention)
        if options is None:
            return found
        return found | {
            "num_local_experts": options.experts,
            "num_experts_per_tok": options.active,
            "intermediate_size": options.intermediate_size,
            "router_aux_loss_coef": _coefficient(options),
            "sliding_window": None,
        }

    def stack(self, ours: str, number: int) -> tuple[str, ...]:
        """`blocks.L.feed_forward.experts.gate_proj.weight` is `model.layers.L.block_sparse_moe.experts.E.w1.weight`."""
        _, found, rest = ours.partition(".feed_forward.experts.")
        inside = f"model.layers.{_layer(ours)}.block_sparse_moe.experts"
        matrix = self._MATRICES.get(rest.partition(".")[0])
        return tuple(f"{inside}.{expert}.{matrix}.weight" for expert in range(number) if found)

    def name(self, ours: str) -> str:
        """The router is `block_sparse_moe.gate`."""
        return super().name(ours.replace(".feed_forward.router.", ".feed_forward.gate."))


def _layer(ours: str) -> str:
    return ours.split(".")[1]
