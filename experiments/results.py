"""The result file of a figure: arms are added one by one, over several calls, sessions and machines."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import provenance
from experiments.figure import Arm, Result, key_of
from moba_train.errors import UserError
from moba_train.output_files import write_atomically
from moba_train.tools.evaluate import finite

_LOCK = threading.Lock()


def read_results(path: Path) -> list[Result]:
    """The arms in a result file; none where there is no file."""
    return list(json.loads(path.read_text())["results"]["arms"]) if path.exists() else []


def held(path: Path, settings: dict[str, Any], arms: Sequence[Arm]) -> set[str]:
    """Keys of the arms that the file holds already.

    Raises UserError where the file is of other settings (another corpus, say), or holds an arm of another recipe: its
    results must not be mixed with those to come.
    """
    if not path.exists():
        return set()
    content = json.loads(path.read_text())
    if content["settings"] != settings:
        raise UserError(
            f"{path}: holds results of other settings; given {json.dumps(settings)}, in the file "
            f"{json.dumps(content['settings'])}; give another --output, or the settings of the file"
        )
    found = set()
    by_key = {arm.key: arm for arm in arms}
    for result in content["results"]["arms"]:
        key = key_of(result)
        arm = by_key.get(key)
        if arm is not None and not _is_result_of(result, arm):
            raise UserError(
                f"{path}: {key} was run with another recipe, or evaluated otherwise, than today's code says; give "
                "another --output, or remove this arm from the file to run it again"
            )
        found.add(key)
    return found


def _is_result_of(result: Result, arm: Arm) -> bool:
    same_recipe = result["recipe"] == json.loads(json.dumps(arm.recipe))
    return same_recipe and result["parent"] == arm.parent and result["evaluations"].keys() == arm.evaluations.keys()


def add_result(path: Path, settings: dict[str, Any], result: Result) -> None:
    """Add a finished arm to the file, which is complete at every moment. An arm that is there stays as it is."""
    with _LOCK:
        arms = read_results(path)
        if key_of(result) in map(key_of, arms):
            return
        arms = sorted([*arms, result], key=lambda arm: (arm["seed"], arm["name"]))
        content = {**provenance("experiments"), "settings": settings, "results": {"arms": finite(arms)}}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
