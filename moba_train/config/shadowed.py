"""Overrides that change nothing, because stages set the key themselves."""

import shlex
from collections.abc import Collection, Sequence

from moba_train.config.explain import path_keys
from moba_train.config.schema import RunConfig, StageConfig

_MERGED = {"attention": "attention", "model.rope": "rope", "parallel": "parallel"}
"""Sections of a recipe that a stage's own is merged over, key by key."""
_REPLACED = {
    "batch_tokens": "batch_tokens",
    "micro_batch_size": "micro_batch_size",
    "data.train": "train",
    "optim.lr": "lr",
    "optim.schedule": "schedule",
}
"""Keys of a recipe that a stage's own replaces."""


def shadowed_overrides(config: RunConfig, overrides: Sequence[str], stages: Collection[int]) -> list[str]:
    """Problems of the `overrides` of a recipe's key that all `stages`, by index, set themselves.

    A stage's key that is among the overrides, too, hides nothing: it was given on purpose. Overrides whose value is a
    mapping are not looked into.
    """
    problems = []
    given = [_path(override) for override in overrides]
    for override in overrides:
        value = override.partition("=")[2]
        own = _own_key(_path(override))
        if own is None or not all(_hides(config, index, own, given) for index in stages):
            continue
        names = ", ".join(repr(config.stages[index].name) for index in stages)
        instead = " ".join(shlex.quote(f"stages.{index}.{own}={value}") for index in stages)
        sets = "every stage sets" if len(stages) == len(config.stages) else f"stage {names} sets"
        problems.append(f"override {override!r}: would change nothing, as {sets} {own} itself; give {instead}")
    return problems


def _path(override: str) -> str:
    """The key of an override, with items of lists by number."""
    return ".".join(map(str, path_keys(override.partition("=")[0])))


def _hides(config: RunConfig, index: int, own: str, given: Sequence[str]) -> bool:
    """Whether the stage's file sets the key `own`, and no override does."""
    key = f"stages.{index}.{own}"
    on_purpose = any(f"{path}.".startswith(f"{key}.") or f"{key}.".startswith(f"{path}.") for path in given)
    return not on_purpose and _sets(config.stages[index], own)


def _own_key(key: str) -> str | None:
    """What `key` of a recipe is called in a stage; None for one that stages do not have."""
    for ours, theirs in {**_MERGED, **_REPLACED}.items():
        if key == ours or key.startswith(f"{ours}."):
            return theirs + key.removeprefix(ours)
    return None


def _sets(stage: StageConfig, key: str) -> bool:
    """Whether the stage gives a value in the place of `key`."""
    first, *rest = key.split(".")
    value = stage.dump_given().get(first)
    if [first, *rest[:1]] == ["attention", "overrides"]:  # a stage's replace the recipe's
        return value is not None and "overrides" in value
    if value is None or first in _REPLACED.values():
        return value is not None
    for part in rest:
        if not isinstance(value, dict):
            return True
        value = {str(name): inner for name, inner in value.items()}
        if part not in value:
            return False
        value = value[part]
    return bool(rest) and not isinstance(value, dict)
