"""Whether a run can go on from the tensors of a checkpoint with a recipe that has changed since it was saved.

Weights of the model itself cannot change, as `progress.check_resumable` sees to. Parameters of attention kinds can,
until a stage has begun that uses their kind in their layer: nothing has trained them.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from moba_train.config.explain import given
from moba_train.config.load import parse_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import resolve_stages, used_kinds
from moba_train.errors import CheckpointError, ConfigError
from moba_train.model.build import describe_shapes, different_shapes, kind_prefix, kind_shapes


def recipe_then(meta: Mapping[str, Any]) -> RunConfig | None:
    """The recipe in the meta of a checkpoint; None where there is none that this version can read."""
    text = meta.get("config")
    with contextlib.suppress(ConfigError):
        if isinstance(text, str):
            config = parse_config(text, "the checkpoint's recipe")
            resolve_stages(config)
            return config
    return None


def check_tensors(config: RunConfig, then: RunConfig, stage: int, where: str) -> None:
    """Raises CheckpointError, naming the key, when the recipe cannot go on with the optimizer state, or with the
    parameters of attention kinds, of the checkpoint `where`, saved in stage number `stage` of the recipe `then`."""
    anew = f"To begin with these weights all the same, set run_dir to a new folder and init_from: {where}"
    if then.optim.kind != config.optim.kind:
        raise CheckpointError(
            f"cannot resume from {where}: optim.kind was {given(then.optim.kind)} when it was saved and is "
            f"{given(config.optim.kind)} now, which keeps another state for each parameter; restore it. {anew}, with a "
            "fresh state"
        )
    before = kind_shapes(then)
    now = kind_shapes(config)
    for layer, kind in sorted(used_kinds(then, stage) | used_kinds(config, stage)):
        there, here = different_shapes(before.get((layer, kind), {}), now.get((layer, kind), {}))
        if there or here:
            index = next(
                index
                for index, stages in enumerate(zip(resolve_stages(then), resolve_stages(config), strict=False))
                if any(resolved.kinds[layer] == kind for resolved in stages)
            )
            raise CheckpointError(
                f"cannot resume from {where}: stages[{index}].attention: parameters of kind {kind!r} in layer {layer} "
                f"were {describe_shapes(there)} when it was saved and are {describe_shapes(here)} now; stages that "
                f"have begun keep their kinds with parameters: restore the attention, or add a stage with another one. "
                f"{anew}"
            )


def unused_parameters(config: RunConfig, then: RunConfig | None, stage: int) -> list[str]:
    """What the names of parameters begin with that attention kinds have in either recipe, and that no stage up to
    number `stage` uses: the checkpoint may lack them, have more of them or have them in another shape."""
    known = set(kind_shapes(config))
    used = used_kinds(config, stage)
    if then is not None:
        known |= set(kind_shapes(then))
        used |= used_kinds(then, stage)
    return [kind_prefix(layer, kind) for layer, kind in sorted(known - used)]
