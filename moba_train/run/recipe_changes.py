"""A recipe that changes when a run resumes: the changes are found and described, and the recipe before is kept."""

import contextlib
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from moba_train.config.explain import given
from moba_train.config.load import dump_config, parse_config, parse_yaml
from moba_train.config.optim import OptimConfig, ScheduleConfig
from moba_train.config.stages import Stage
from moba_train.errors import ConfigError, ForeignFileError, UnusableFolderError
from moba_train.foreign_files import JSON_BYTES, read_foreign
from moba_train.optim.spec import stage_learning_rate
from moba_train.output_files import write_atomically
from moba_train.registry import ATTENTION_KINDS
from moba_train.resolve.run import ResolvedRun, resolve_unchecked
from moba_train.run.progress import Progress, differences

MOST_SHOWN = 20
"""Changed keys that a message names; the event's `changes` have all."""

Changes = dict[str, list[Any]]
"""[old value, new value] of each changed key, as JSON values; None where a key is not given."""


_HOLDS_NOW = {"nesterov": True, "steps": 5, "temperature": 1.0, "counted": "loss_tokens"}
"""Values that hold for keys that are gone: with other ones training went another way."""


def recipe_changes(before: str, recipe: str) -> Changes:
    """The keys in which `recipe`, which `dump_config` wrote, differs from `before`, which that of any version wrote.

    A key that `before` does not know, because its version was older, counts with its default. Of keys that are gone
    since, those count with which training was another one.
    """
    written = _values(before)
    with contextlib.suppress(ConfigError):  # a recipe that this version cannot read is compared as it is written
        before = dump_config(parse_config(before, "the recipe before"))
    old, new = _values(before), _values(recipe)
    _add_default_options(_attention(old), _attention(new))
    changes = {key: [was, now] for key, was, now in differences(old, new)}
    for key, was, _ in differences(written, old):
        name = key.rpartition(".")[2]
        if name in _HOLDS_NOW and was not in (None, _HOLDS_NOW[name]):
            changes[key] = [was, _HOLDS_NOW[name]]
    return changes


def describe_changes(changes: Changes) -> str:
    """The changes in one line; long values are shortened."""
    shown = [f"{key} {given(old)} -> {given(new)}" for key, (old, new) in list(changes.items())[:MOST_SHOWN]]
    return ", ".join(shown + [f"and {len(changes) - MOST_SHOWN} more"] * (len(changes) > MOST_SHOWN))


def rate_jump(before: str, run: ResolvedRun, progress: Progress) -> str | None:
    """Warning where a run goes on from `progress` with a learning rate that differs by more than a fifth from the one
    that the recipe `before` would have gone on with, or had at its end, although both have the same rates and
    schedules: those span other tokens now.

    None where it does not, and where a stage begins a schedule of its own.
    """
    try:
        old = resolve_unchecked(parse_config(before, "the recipe before")).after_exit(progress.exited_steps)
    except ConfigError:
        return None
    stages = run.after_exit(progress.exited_steps).stages
    ended = progress.step == stages[progress.stage].end_step
    begun = progress.stage + 1
    next_one = progress.stage + ended
    if next_one == len(stages) or _rates(old.optim, old.stages[:begun]) != _rates(run.optim, stages[:begun]):
        return None
    stage = stages[next_one]
    if ended and stage.schedule is not None:
        return None
    schedule = run.optim.schedule
    was = _rate(old.stages, schedule, progress, progress.stage, step=0)
    now = _rate(stages, schedule, progress, next_one, step=1)
    goes_on = next_one < len(old.stages) and progress.step < old.stages[next_one].end_step
    wanted = _rate(old.stages, schedule, progress, next_one, step=1) if goes_on else was
    if wanted == 0 or 0.8 <= now / wanted <= 1.2:
        return None
    own = f"stages[{next_one}].schedule"
    spans = "optim.schedule spans all stages" if stage.schedule is None else f"{own} spans the stage"
    return (
        f"the learning rate was {was:.2e} and goes on with {now:.2e}, because {spans}, with other tokens now; {own} "
        f"and stages[{next_one}].lr give this stage rates of its own"
    )


def _rates(optim: OptimConfig, stages: Sequence[Stage]) -> list[Any]:
    """Learning rate and schedule of the recipe, and those of these stages."""
    return [(optim.lr, optim.schedule), *((stage.lr, stage.schedule) for stage in stages)]


def _rate(stages: Sequence[Stage], schedule: ScheduleConfig, progress: Progress, index: int, step: int) -> float:
    """Learning rate of the last step (`step` 0) or the next one (1), which belongs to stage `index`."""
    tokens = stages[progress.stage].tokens_after(progress.step) + step * stages[index].batch_tokens
    return stage_learning_rate(stages, index, schedule, tokens)


def write_recipe(run_dir: Path, text: str, step: int) -> str | None:
    """Write the recipe `text` into `config.yaml`, for a run that goes on after `step`.

    A different one that is there is first copied to `config.step_00000123.yaml`, the recipe that was in use up to that
    step, or -2, -3, ... if there is such a file already: none is ever overwritten. Returns the text of that recipe.
    Raises UnusableFolderError when a file cannot be read or written.
    """
    path = run_dir / "config.yaml"
    try:
        before = _text_of(path) if path.exists() else text
        if before != text:
            _keep(before, run_dir, step)
        if before != text or not path.exists():
            write_atomically(path, text)
    except (OSError, ForeignFileError) as error:
        text = f"run_dir {run_dir} cannot be used: the recipe is kept in {path.name}: {error}"
        raise UnusableFolderError(text) from error
    return before if before != text else None


def _keep(text: str, run_dir: Path, step: int) -> None:
    for number in count(1):
        path = run_dir / f"config.step_{step:08d}{f'-{number}' * (number > 1)}.yaml"
        if not path.exists():
            write_atomically(path, text)
            return
        if _text_of(path) == text:
            return  # a start before this one kept it, and died before it replaced config.yaml


def _text_of(path: Path) -> str:
    return read_foreign(path, JSON_BYTES, links=False).decode(errors="replace")


def _values(text: str) -> Any:
    try:
        return parse_yaml(text, "recipe")
    except ConfigError:
        return None


def _attention(values: Any) -> dict[str, Any]:
    attention = values.get("attention") if isinstance(values, dict) else None
    return attention if isinstance(attention, dict) else {}


def _add_default_options(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Write the defaults of each kind that only one of two sections `attention` names into the other one.

    A kind's options are written down if a recipe gives them: a section of defaults that is added changes nothing.
    """
    for kind in (old.keys() ^ new.keys()) & {*ATTENTION_KINDS}:
        defaults = ATTENTION_KINDS[kind].Options().model_dump(mode="json")
        old.setdefault(kind, defaults)
        new.setdefault(kind, defaults)
