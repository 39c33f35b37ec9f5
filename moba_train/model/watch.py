"""Watching the attention of a model's layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from moba_train.attention.operators import OperatorEngine
from moba_train.attention.watched import WatchedEngine
from moba_train.model.transformer import Transformer

Watched = TypeVar("Watched", bound=WatchedEngine)


@contextmanager
def watched_layers(
    model: Transformer, engine: OperatorEngine, watch: Callable[[int], Watched]
) -> Iterator[list[Watched]]:
    """Inside, `watch(layer)` runs the attention of each layer of the whole model, first to last, in place of `engine`.

    Compiled blocks run uncompiled there: they would be compiled anew for other engines.
    """
    engines = [watch(layer) for layer in range(model.config.layers)]
    model.set_engines(engines)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield engines
    finally:
        model.set_engines([engine] * len(engines))
