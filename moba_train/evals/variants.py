"""Which attentions a model is evaluated with, on the same weights."""

from typing import Literal

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention, resolve_layers
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import UserError

Layers = tuple[LayerAttention, ...]


def name_of(layers: Layers) -> str:
    """The kind that makes these layers what they are: the first that is not `full`, else "full"."""
    return next((layer.kind for layer in layers if layer.kind != "full"), "full")


def with_full(layers: Layers) -> dict[str, Layers]:
    """By name: these layers, and full attention everywhere unless that is what they are."""
    full = tuple(LayerAttention("full", FullAttention.Options()) for _ in layers)
    return {name_of(layers): layers} | ({"full": full} if name_of(layers) != "full" else {})


def variants(config: RunConfig, stage: Stage, wanted: Literal["full", "moba", "both"]) -> dict[str, Layers]:
    """By name, what a checkpoint of `stage` is evaluated with: MoBA is the stage's own attention or, where all its
    layers are full, the recipe's.

    Raises UserError where only MoBA is wanted and there is none.
    """
    own = stage.attention
    if name_of(own) == "full":
        own = resolve_layers(config.attention, config.model.layers)
    found = with_full(own)
    if wanted == "both":
        return found
    if wanted == "full":
        return {"full": found["full"]}
    if name_of(own) == "full":
        raise UserError(
            "--attention moba: neither the checkpoint's stage nor its recipe has any other than full layers"
        )
    return {name_of(own): own}
