"""F15: a base that does not retrieve is not converted, and arms are judged by the needles of each mode."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import corpus, page
from experiments.__main__ import main
from experiments.conversion import Conversion
from experiments.figure import Result
from experiments.registry import FIGURES


def converted(name: str, seed: int, own: float, answers: float) -> Result:
    """Result of an arm that finds these shares of the needles."""
    (arm,) = (one for one in Conversion().arms(seed, quick=False) if one.name == name)
    curves: dict[str, Any] = {"full": {"mean": [1.0]}}
    maps: dict[str, Any] = {"full": {"score": 0.95}}
    if name != "full":
        kind = name.partition("-")[0]
        curves[kind] = {"mean": [1.1]}
        maps |= {kind: {"score": own}, f"{kind}, answers with full": {"score": answers}}
    found = {"position_wise": {"curves": curves}, "needle": {"maps": maps}}
    history = [{"evaluation": "needle", "needle": 0.3}, {"evaluation": "needle", "needle": own}]
    recipe = json.loads(json.dumps(arm.recipe))
    return {"name": name, "seed": seed, "recipe": recipe, "evaluations": {"answers": found}, "history": history}


def test_the_claims_are_judged_from_the_needles_of_each_mode() -> None:
    rng = np.random.default_rng(0)
    shares = {"full": (0.95, 0.95), "moba-128": (0.9, 0.94), "moba-512": (0.5, 0.8), "window": (0.2, 0.3)}
    results = [
        converted(name, seed, *(share + rng.normal(0, 0.004) for share in both))
        for seed in range(3)
        for name, both in shares.items()
    ]
    finding = Conversion().find(results)
    assert [verdict.word for verdict in finding.verdicts] == ["agrees"] * 4
    worse = [converted(one["name"], one["seed"], 0.2, 0.3 + 1e-3 * one["seed"]) for one in results]
    assert [verdict.word for verdict in Conversion().find(worse).verdicts] == ["does not agree"] * 4
    row = next(row for row in finding.rows if row[0] == "MoBA 128/16")
    assert row[2] == "0.3000"


def test_a_base_that_does_not_retrieve_is_not_converted() -> None:
    base: Result = {"name": "base", "seed": 1, "evaluations": {}, "stages": {"long": {"needle": {"needle": 0.62}}}}
    arms = [arm for arm in Conversion().arms(1, quick=False) if arm.parent]
    assert len(arms) == 4
    for arm in arms:
        assert Conversion().refusal(arm, [base], quick=False) == "the base of seed 1 finds 0.62; the bar is 0.9"
        assert Conversion().refusal(arm, [base], quick=True) == ""


@pytest.mark.usefixtures("in_this_process")
def test_the_smallest_form_learns_and_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 17)
    assert main(["conversion", "--quick", "--gpus", "0", "--seconds", "1e6", "--arms", "moba-128"]) == 0
    output = Path("runs/experiments/conversion-quick.json")
    results = {arm["name"]: arm for arm in json.loads(output.read_text())["results"]["arms"]}
    assert results.keys() == {"base", "moba-128"}
    needles = [one["step"] for one in results["moba-128"]["history"] if one["evaluation"] == "needle"]
    assert needles[0] == 0, "before the first step"
    maps = results["moba-128"]["evaluations"]["answers"]["needle"]["maps"]
    assert list(maps) == ["moba", "moba, answers with full", "full"]
    page.draw(FIGURES["conversion"], output, output.with_suffix(".svg"))
    assert "<svg" in output.with_suffix(".svg").read_text()
