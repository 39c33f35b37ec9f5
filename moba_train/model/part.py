"""Part of a model, for a rank of a pipeline: some of the modules, under the names that they have in the whole model."""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from torch import nn

from moba_train.model.transformer import Transformer

T = TypeVar("T")


class ModelPart(NamedTuple):
    """Modules of the model that a rank of a pipeline has."""

    layers: tuple[int, ...]
    """Numbers of its blocks, ascending."""
    has_embedding: bool
    has_output: bool
    """True if it has the last norm and the output projection."""


def cut_to_part(model: Transformer, part: ModelPart) -> None:
    """Remove the modules that are not in the part. With tied embeddings, the part with the output projection keeps a
    copy of the embedding for it."""
    for layer in own_layers(model):
        if layer not in part.layers:
            # Names stay those of the whole model, so that checkpoints of any pipeline fit.
            delattr(model.blocks, str(layer))
    if not part.has_embedding and not (part.has_output and model.output is None):
        del model.embedding
    if not part.has_output:
        del model.norm
        model.output = None


def own_layers(model: Transformer) -> list[int]:
    """Numbers of the blocks here, as in the whole model."""
    return [int(name) for name, _ in model.blocks.named_children()]


def of_own_layers(model: Transformer, by_layer: Iterable[T]) -> list[T]:
    """The values that belong to the blocks here, from those of all layers of the whole model, first to last."""
    values = list(by_layer)
    assert len(values) == model.config.layers
    return [values[layer] for layer in own_layers(model)]


def is_whole(model: Transformer) -> bool:
    """True for the whole model, False for a part of it."""
    return len(model.blocks) == model.config.layers


def copied_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters here that are copies of another part's, which saves them: the first one has the
    embedding. None for any other module."""
    copied = isinstance(model, Transformer) and hasattr(model, "embedding") and 0 not in own_layers(model)
    return frozenset({"embedding.weight"} if copied else ())
