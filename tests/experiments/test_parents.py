"""Arms that begin with the weights of another one begin only with those that its result is of."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments import __main__ as program
from experiments import page, work
from experiments.figure import Arm, Finding, Result
from experiments.third_cliff import ThirdCliff


class Runs:
    """Pretends to train: an arm's only loss is `losses[name]`, and what children began with is kept."""

    def __init__(self) -> None:
        self.losses = {"base": 3.0}
        self.ran: list[str] = []
        self.began_with: list[float] = []
        self.error: Exception | None = None

    def __call__(self, arm: Arm, corpus: Any, runs: Path, *_: Any) -> Result:
        self.ran.append(arm.name)
        if self.error is not None:
            raise self.error
        if arm.parent is not None:
            record = json.loads((runs / f"{arm.parent}-seed0" / "metrics.jsonl").read_text())
            self.began_with.append(record["loss"])
        folder = runs / arm.key
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        loss = self.losses.get(arm.name, 1.0)
        (folder / "metrics.jsonl").write_text(json.dumps({"type": "metrics", "step": 1, "loss": loss}) + "\n")
        how = {"device": None, "gpus": 0, "arms_per_gpu": 1, "seconds": 1.0, "tokens_per_s": 1}
        known = {"name": arm.name, "seed": arm.seed, "recipe": dict(arm.recipe), "parent": arm.parent}
        return {**known, **how, "losses": [[1, loss]], "evaluations": dict(arm.evaluations)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    monkeypatch.chdir(tmp_path)
    found = Runs()
    monkeypatch.setattr(work, "run_arm", found)
    monkeypatch.setattr(ThirdCliff, "prepare", lambda *_: None)
    monkeypatch.setattr(ThirdCliff, "find", lambda *_: Finding([], [["nothing"]]))
    monkeypatch.setattr("experiments.corpus.QUICK_TOKENS", 1 << 14)
    return found


def call(output: str, *arms: str, runs: str = "runs") -> int:
    """The figure's call for these arms."""
    quick = ["--quick", "--gpus", "0", "--seconds", "1e6"]
    return program.main(["third-cliff", *quick, "--runs", runs, "--output", output, "--arms", *arms])


def held(output: str) -> list[str]:
    """Names of the arms in a file."""
    return [result["name"] for result in page.read_results(Path(output))]


def test_a_parent_that_another_file_has_is_made_anew_for_this_one(runs: Runs) -> None:
    assert call("a.json", "base", "none-1") == 0
    assert call("b.json", "none-1") == 0
    assert runs.ran == ["base", "none-1"] * 2
    assert held("b.json") == ["base", "none-1"]


def test_weights_of_another_file_are_not_those_of_this_one(runs: Runs) -> None:
    assert call("a.json", "base", "none-1") == 0
    runs.losses["base"] = 3.1
    assert call("b.json", "none-1") == 0
    runs.losses["base"] = 3.0
    assert call("a.json", "none-10") == 0
    assert runs.began_with == [3.0, 3.1, 3.0]


def _without_its_mark() -> None:
    Path("runs/third-cliff-quick/base-seed0/arm-finished").unlink()


def _without_its_folder() -> None:
    shutil.rmtree("runs/third-cliff-quick/base-seed0")


@pytest.mark.parametrize("lost", [_without_its_mark, _without_its_folder])
def test_a_parent_whose_weights_are_gone_is_made_anew_and_goes_on_where_its_losses_are_equal(
    runs: Runs, lost: Callable[[], None]
) -> None:
    assert call("a.json", "base", "none-1") == 0
    lost()
    assert call("a.json", "none-10") == 0
    assert runs.ran == ["base", "none-1", "base", "none-10"]
    assert call("a.json", "all-1") == 0
    assert runs.ran[4:] == ["all-1"], "the weights are there again"


def test_no_arm_begins_with_weights_that_are_not_those_of_the_result(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("a.json", "base", "none-1") == 0
    runs.losses["base"] = 3.1
    for _ in range(2):
        assert call("a.json", "none-10", runs="elsewhere") == 1
    assert runs.ran[2:] == ["base", "base"]
    assert held("a.json") == ["base", "none-1"]
    printed = capsys.readouterr().out.splitlines()
    (child,) = {line for line in printed if line.startswith("not finished: ")}
    assert child.endswith("; it needs the weights of base")
    (said,) = {line for line in printed if line.startswith("failed: ")}
    assert said == (
        "failed: third-cliff/base-seed0: trained again for its weights, it has other losses than its result in a.json, "
        "so these are other weights, and no arm begins with them; copy the folder "
        "elsewhere/third-cliff-quick/base-seed0 from the machine where the result was made, or give another --output "
        "to begin a new file"
    )
    shutil.copytree("runs/third-cliff-quick/base-seed0", "elsewhere/third-cliff-quick/base-seed0", dirs_exist_ok=True)
    assert call("a.json", "none-10", runs="elsewhere") == 0
    assert runs.ran[4:] == ["none-10"]
    assert runs.began_with == [3.0, 3.0]


def test_an_error_without_text_is_reported_by_its_name(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    runs.error = StopIteration()
    assert call("a.json", "base") == 1
    printed = capsys.readouterr().out
    assert "third-cliff/base-seed0: failed: StopIteration()" in printed
    assert "failed: third-cliff/base-seed0: StopIteration(); the same command runs it again" in printed
