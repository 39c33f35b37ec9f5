"""Whether the parameters that a stage is to train exist."""

import difflib
from collections.abc import Iterator

import torch

from moba_train.config.schema import RunConfig
from moba_train.model.transformer import Transformer
from moba_train.optim.trainable import is_trainable


def trainable_problems(config: RunConfig) -> Iterator[str]:
    """Patterns in `stages[i].trainable` that no parameter of the model matches. The recipe's model must be sound."""
    if all(stage.trainable == "all" for stage in config.stages):
        return
    names = _parameter_names(config)
    for index, stage in enumerate(config.stages):
        for place, pattern in enumerate(() if stage.trainable == "all" else stage.trainable):
            if any(is_trainable(name, [pattern]) for name in names):
                continue
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            hint = f"; closest: {', '.join(close)}" if close else f"; they begin with {names[0]}, {names[1]}"
            yield f"stages[{index}].trainable[{place}]: given {pattern!r}, which no parameter's name matches{hint}"


def _parameter_names(config: RunConfig) -> list[str]:
    with torch.device("meta"):
        model = Transformer(config.model)
    return [name for name, _ in model.named_parameters()]
