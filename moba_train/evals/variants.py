"""Which attentions a model is evaluated with, on the same weights."""

from typing import Literal

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention, resolve_layers
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage

Layers = tuple[LayerAttention, ...]
"""The attention of every layer, first to last."""


def name_of(layers: Layers) -> str:
    """The attention kinds of the layers but `full`, in alphabetical order: `moba`, `moba+nsa`; "full" where all layers
    are. Layers of full attention among others, as in hybrid recipes, do not count: `full` is what these are compared
    with."""
    return "+".join(sorted({layer.kind for layer in layers} - {"full"})) or "full"


def with_full(layers: Layers) -> dict[str, Layers]:
    """These layers, and full attention in every layer where they are anything else, by name."""
    full = tuple(LayerAttention("full", FullAttention.Options()) for _ in layers)
    return {name_of(layers): layers} | ({"full": full} if name_of(layers) != "full" else {})


def variants(config: RunConfig, stage: Stage, wanted: Literal["full", "own", "both"]) -> dict[str, Layers]:
    """The attentions that a checkpoint of `stage` is evaluated with, by name.

    `own` is the stage's attention or, where all its layers are full, the recipe's; where those are full, too, it is
    `full`.
    """
    own = stage.attention
    if name_of(own) == "full":
        own = resolve_layers(config.attention, config.model.layers)
    found = with_full(own)
    if wanted == "both":
        return found
    name = name_of(own) if wanted == "own" else "full"
    return {name: found[name]}
