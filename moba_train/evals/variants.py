"""Which attentions a model is evaluated with, on the same weights."""

from moba_train.attention.full import FullAttention
from moba_train.config.attention import LayerAttention

Layers = tuple[LayerAttention, ...]


def name_of(layers: Layers) -> str:
    """The kind that makes these layers what they are: the first that is not `full`, else "full"."""
    return next((layer.kind for layer in layers if layer.kind != "full"), "full")


def all_full(layers: Layers) -> Layers:
    """As many layers, all with full attention."""
    return tuple(LayerAttention("full", FullAttention.Options()) for _ in layers)


def with_full(layers: Layers) -> dict[str, Layers]:
    """By name: these layers, and full attention everywhere unless that is what they are."""
    return {name_of(layers): layers, "full": all_full(layers) if name_of(layers) != "full" else layers}
