"""Whether the parameters that a stage is to train exist."""

import difflib
from collections.abc import Iterator

import torch

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.model.build import build_attention, build_model, kind_of_parameter
from moba_train.optim.trainable import is_trainable


def trainable_problems(config: RunConfig) -> Iterator[str]:
    """Patterns in `stages[i].trainable` that no parameter of the model matches, and stages that would train nothing.

    The recipe's model must be sound.
    """
    if all(stage.trainable == "all" for stage in config.stages):
        return
    names = _parameter_names(config)
    for index, (stage, resolved) in enumerate(zip(config.stages, resolve_stages(config), strict=True)):
        used = [name for name in names if kind_of_parameter(name) in ("", *resolved.kinds)]
        matched = [name for name in names if is_trainable(name, resolved.trainable)]
        trained = [name for name in matched if name in used]
        if matched and not trained:
            yield (
                f"stages[{index}].trainable: given {stage.trainable}, which names parameters of attention kinds that "
                f"stage {stage.name!r} does not use, so nothing would be trained; change it or the stage's attention"
            )
        elif trained and not any(_learns(name, resolved, config) for name in trained):
            kinds = ", ".join(sorted({kind_of_parameter(name) for name in trained}))
            yield (
                f"stages[{index}].trainable: given {stage.trainable}, which names gates alone, and those of {kinds} do "
                f"not learn as stage {stage.name!r} uses them, so nothing would be trained; set train_gate: true or "
                "mode: warmup, or change it"
            )
        for place, pattern in enumerate(() if stage.trainable == "all" else stage.trainable):
            if any(is_trainable(name, [pattern]) for name in names):
                continue
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
            hint = f"; closest: {', '.join(close)}" if close else f"; they begin with {names[0]}, {names[1]}"
            yield f"stages[{index}].trainable[{place}]: given {pattern!r}, which no parameter's name matches{hint}"


def _learns(name: str, stage: Stage, config: RunConfig) -> bool:
    """Whether the parameter gets gradients in a stage: those of an attention kind may not, as its options say."""
    if not (kind := kind_of_parameter(name)):
        return True
    layer = stage.attention[int(name.split(".")[1])]
    return layer.kind == kind and build_attention([layer], config.model.head_width)[0].learns


def _parameter_names(config: RunConfig) -> list[str]:
    with torch.device("meta"):
        model = build_model(config)
    return [name for name, _ in model.named_parameters()]
