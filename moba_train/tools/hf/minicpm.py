"""MiniCPM 4.1 of OpenBMB (InfLLM-V2, arXiv:2509.24663): Llama with three factors, `infllm_v2` in all layers or none.

transformers has no such model: its code is in the published repository, which config.json names. An export takes it
where it is asked for (`convert moba-to-hf --as`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.hf.family import Family

_CODE = "openbmb/MiniCPM4.1-8B--"
_SIZES = {
    "block_size": "block_size",
    "first_blocks": "init_blocks",
    "window": "kernel_size",
    "stride": "kernel_stride",
    "dense_len": "dense_len",
}
"""Options of `infllm_v2`, and keys of `sparse_config` with equal values."""


class MiniCPM(Family):
    """MiniCPM 4 and 4.1."""

    architecture = "MiniCPMForCausalLM"
    needs_code = True
    asked_for = True
    same = Family.same | {"embedding_scale": "scale_emb"}
    defaults = Family.defaults | {"scale_emb": 1, "dim_model_base": 1, "scale_depth": 1}
    others = frozenset({"sparse_config", "mup_denominator"})

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The factors on what layers add and on logits follow from the sizes."""
        for key in ("scale_depth", "dim_model_base"):
            if type(config[key]) not in (int, float) or not config[key] > 0:
                raise CheckpointError(f"{key} is {given(config[key])}, allowed: number > 0")
        return super().values(config) | {
            "residual_scale": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
            "logits_divisor": config["hidden_size"] / config["dim_model_base"],
        }

    def attention(self, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`infllm_v2` in all layers if there is a `sparse_config`. Our `topk` also counts local blocks."""
        layers = super().attention(config)
        sparse = config.get("sparse_config")
        if sparse is None:
            return layers
        needed = {*_SIZES.values(), "topk", "window_size"}
        numbers = isinstance(sparse, dict) and all(type(sparse.get(key)) is int for key in needed)
        if not numbers or sparse.keys() - needed - {"use_nope"} or sparse.get("use_nope"):
            raise CheckpointError(
                f"sparse_config is {given(sparse)}, allowed: an object with integers {', '.join(sorted(needed))}"
            )
        local = sparse["window_size"] // max(sparse["block_size"], 1)
        sizes = {ours: sparse[theirs] for ours, theirs in _SIZES.items()}
        own = {"kind": "infllm_v2", "topk": sparse["topk"] + local, "local_blocks": local, **sizes}
        return [own for _ in layers]

    def cautions(self, config: Mapping[str, Any]) -> Iterator[str]:
        """The published code looks at the length of the whole text where ours looks at a query's position."""
        for own in self.attention(config)[:1]:
            selected = own["topk"] * own["block_size"] if own else 0
            if own and own["dense_len"] > selected:
                yield (
                    f"in texts longer than dense_len ({own['dense_len']}) MiniCPM's code also selects blocks for "
                    f"queries at the positions from {selected} to dense_len, which attend to everything here"
                )

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """With the place of the code."""
        depth = math.sqrt(model.layers)
        scale = model.residual_scale * depth
        around = (scale, math.nextafter(scale, math.inf), math.nextafter(scale, 0))
        found = super().written(model, attention) | {
            # Read, it is to be the same number.
            "scale_depth": next((number for number in around if number / depth == model.residual_scale), scale),
            "dim_model_base": model.hidden_size / model.logits_divisor,
            "auto_map": {
                "AutoConfig": f"{_CODE}configuration_minicpm.MiniCPMConfig",
                "AutoModelForCausalLM": f"{_CODE}modeling_minicpm.MiniCPMForCausalLM",
            },
        }
        own = attention[0]
        if not own:
            return found
        if own.get("kind") != "infllm_v2":
            raise CheckpointError(f"kind {own.get('kind')!r} of layer 0: allowed in MiniCPM: full, infllm_v2")
        sparse = {theirs: own[ours] for ours, theirs in _SIZES.items()}
        local = own["local_blocks"]
        sizes = {"topk": own["topk"] - local, "window_size": local * own["block_size"], "use_nope": False}
        return found | {"sparse_config": sparse | sizes}
