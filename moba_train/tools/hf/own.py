"""Models that no architecture of transformers computes: exports with code of their own (`convert --with-code`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from moba_train.config.explain import given
from moba_train.config.layers import layer_ids
from moba_train.config.model import ModelConfig
from moba_train.errors import CheckpointError
from moba_train.tools.convert.remote_code.options import ROPE, SHAPE
from moba_train.tools.hf.family import Family


class MobaTrain(Family):
    """Our `model` section in our words: sizes as Llama has them, the rest in `moba.model`, RoPE in `moba.ropes`."""

    architecture = "MobaForCausalLM"
    needs_code = True
    asked_for = True
    own_ropes = True
    heads_divide_width = False
    is_ours = True
    defaults = {}
    fixed = {"quantization_config": None}
    names = Family.names | {
        "attention_post_norm": "attention_post_norm",
        "feed_forward_post_norm": "feed_forward_post_norm",
    }

    def values(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """With the contents of `moba.model` and `moba.ropes`."""
        given_moba = config.get("moba")
        moba = given_moba if isinstance(given_moba, dict) else {}
        shape = moba.get("model")
        if not isinstance(shape, dict) or shape.keys() - SHAPE.keys():
            raise CheckpointError(f"moba.model is {given(shape)}, allowed: an object of {', '.join(sorted(SHAPE))}")
        layers = config["num_hidden_layers"]
        ropes = moba.get("ropes")
        known = isinstance(ropes, list) and all(isinstance(rope, dict) and rope.keys() <= ROPE for rope in ropes)
        if not isinstance(ropes, list) or not known or len(ropes) != layers:
            raise CheckpointError(
                f"moba.ropes is {given(ropes)}, allowed: a list of {layers} objects of {', '.join(sorted(ROPE))}"
            )
        common = max(ropes, key=ropes.count)
        overrides = {layer: rope for layer, rope in enumerate(ropes) if rope != common}
        found = {ours: config[theirs] for ours, theirs in self.same.items()}
        return found | {"head_dim": config.get("head_dim"), "rope": common | {"overrides": overrides}} | shape

    def written(self, model: ModelConfig, attention: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`moba` without the layers' attention."""
        shape = model.model_dump(include=set(SHAPE))
        for key in ("sink_layers", "gate_layers"):
            shape[key] = sorted(layer_ids(shape[key], model.layers))
        if shape.get("moe"):
            shape["moe"]["layers"] = sorted(layer_ids(shape["moe"]["layers"], model.layers))
        ropes = [
            rope.model_dump(include=set(ROPE)) | ({} if rope.kind == "pi" else {"beta_fast": rope.fast_turns})
            for rope in model.rope.by_layer(model.layers)
        ]
        return {"moba": {"model": shape, "ropes": ropes}}
