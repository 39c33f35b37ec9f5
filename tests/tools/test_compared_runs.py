"""`moba-train compare` names what differs first between two runs, and nothing between two that are deterministic."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from moba_train.errors import UserError
from moba_train.telemetry.jsonl import read_records
from moba_train.tools import compare as comparing
from moba_train.tools.cli import app
from moba_train.tools.compare import _difference
from tests.commands import run_app
from tests.run.tiny_run import Run


def compare(*arguments: object, code: int = 0) -> str:
    return run_app(app, "compare", *arguments, code=code).output


@dataclass
class Runs:
    """Three run folders of two stages of six steps: twice the same recipe, and once another rate from step 10 on."""

    one: Path
    again: Path
    other: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Runs:
    def trained(name: str, *overrides: str) -> Path:
        run = Run(tmp_path_factory.mktemp(name), corpora)
        run.recipe["deterministic"] = True
        run.recipe["stages"][0]["micro_batch_size"] = 2  # sums in another order than two ranks'
        assert run.train_here(*overrides) == 0
        return run.run_dir

    one, again = trained("one"), trained("again")
    stages = json.dumps([{"name": "other", "seq_len": 64, "tokens": 6 * 512}])
    return Runs(one, again, trained("other", "optim.schedule.warmup_tokens=2000", f"stages={stages}"))


def test_the_same_recipe_gives_the_same_bits(runs: Runs) -> None:
    output = compare(runs.one, runs.again)
    assert re.fullmatch(r"(\d+) of \1 tensors are equal\n", output), output
    output = compare(runs.one / "metrics.jsonl", runs.again / "metrics.jsonl")
    assert output.strip() == "12 of 12 steps are equal"
    assert not torch.are_deterministic_algorithms_enabled(), "left as it was"


def test_the_first_difference_is_named_in_the_order_of_the_model(runs: Runs) -> None:
    output = compare(runs.one, runs.other, code=1)
    first = output.splitlines()[1]
    assert first.startswith("first difference: model.embedding.weight: differs by up to")
    output = compare(runs.one, runs.other, "--tolerance", "1e9")


def test_the_first_step_that_differs_is_named(runs: Runs, tmp_path: Path) -> None:
    changed = read_records(runs.one / "metrics.jsonl")
    for record in changed:
        if record["type"] == "metrics" and record["step"] >= 7:
            record["loss"] *= 1 + 1e-6
    other = tmp_path / "metrics.jsonl"
    other.write_text("".join(json.dumps(record) + "\n" for record in changed))
    output = compare(runs.one / "metrics.jsonl", other, code=1)
    assert output.splitlines()[0] == "6 of 12 steps are equal"
    assert output.splitlines()[1].startswith("first difference: step 7: loss ")
    compare(runs.one / "metrics.jsonl", other, "--tolerance", "1e-5")


@pytest.mark.parametrize("value", [math.inf, math.nan, "Infinity", "NaN", "nan", None])
def test_a_tolerance_does_not_cover_a_value_that_is_not_finite(tmp_path: Path, value: float | str | None) -> None:
    """Whichever of the two files has it, as a string or as a bare word; a damaged record is no crash."""
    sound, other = tmp_path / "sound.jsonl", tmp_path / "other.jsonl"
    for path, loss in ((sound, 1.0), (other, value)):
        path.write_text(json.dumps({"type": "metrics", "step": 1, "loss": loss, "grad_norm": 1.0}) + "\n")
    for pair in ((sound, other), (other, sound)):
        output = compare(*pair, "--tolerance", "1e-4", code=1)
        assert "first difference: step 1: loss " in output
    compare(other, other, "--tolerance", "1e-4")


def test_damaged_lines_are_named(tmp_path: Path) -> None:
    """A last line without an end is none: the run may be writing it."""
    lines = [json.dumps({"type": "metrics", "step": step, "loss": 1.0}) for step in range(1, 10)]
    sound, torn, damaged = (tmp_path / f"{name}.jsonl" for name in ("sound", "torn", "damaged"))
    sound.write_text("\n".join(lines) + "\n")
    torn.write_text("\n".join([*lines, '{"type": "metrics", "st']))
    assert compare(sound, torn) == "9 of 9 steps are equal\n"
    for count, told in ((1, "3"), (6, "3-8")):
        damaged.write_text(
            "\n".join([*lines[:2], *[line[:-3] for line in lines[2 : 2 + count]], "", *lines[2 + count :], ""])
        )
        output = compare(sound, damaged, code=1)
        assert re.search(rf"note: {damaged}: damaged lines, which are left out: {told}\n", output)
        assert "first difference: step 3: only in" in output


def test_a_run_on_two_ranks_is_compared_with_one_on_one(runs: Runs, finished_run: Run) -> None:
    """Other shards and sums in another order: the same tensors, but for rounding."""
    output = compare(runs.one, finished_run.run_dir, code=1)
    assert "only in" not in output
    compare(runs.one / "metrics.jsonl", finished_run.run_dir / "metrics.jsonl", "--tolerance", "1e-4")


def test_without_a_tolerance_every_bit_counts() -> None:
    """The sign of a zero too; with one, numbers."""
    ours, theirs = torch.tensor([0.0, 2.0, 3.0]), torch.tensor([-0.0, 2.0, 3.0])
    assert "differs by up to 0, relative 0, in 1 of 3 numbers" in _difference(ours, theirs, 0.0)
    assert not _difference(ours, theirs, 1e-6)
    assert not _difference(ours[:1], theirs[:1], 1e-6)
    assert _difference(ours[:1], theirs[1:2], 1e-6)


def test_what_cannot_be_compared_is_refused(runs: Runs, tmp_path: Path) -> None:
    for other in (runs.one / "metrics.jsonl", tmp_path):
        output = compare(runs.one, other, code=2)
        assert str(other) in output


def metrics(path: Path, *losses: float) -> Path:
    records = [
        {"type": "metrics", "step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "equal"),
    [
        (2.0, 2.0, 0.0, True),
        (2.0, math.nextafter(2.0, 3.0), 0.0, False),
        (2.0, 2.02, 0.011, True),
        (2.0, 2.02, 0.009, False),
        (math.nan, math.nan, 0.0, True),
        (math.inf, math.inf, 0.0, True),
        (math.inf, -math.inf, 1.0, False),
        (2.0, math.nan, 1.0, False),
        (math.inf, 2.0, 1.0, False),
    ],
)
def test_numbers_are_equal_within_a_relative_tolerance(
    one: float, other: float, tolerance: float, equal: bool, tmp_path: Path
) -> None:
    ours, theirs = metrics(tmp_path / "a.jsonl", 1.0, one), metrics(tmp_path / "b.jsonl", 1.0, other)
    found = comparing.compare(ours, theirs, tolerance)
    assert found.compared == 2
    assert [text.partition(":")[0] for text in found.differing] == ([] if equal else ["step 2"])


def test_a_step_of_one_run_alone_differs(tmp_path: Path) -> None:
    ours, theirs = metrics(tmp_path / "a.jsonl", 1.0, 2.0), metrics(tmp_path / "b.jsonl", 1.0)
    assert comparing.compare(ours, theirs).differing == [f"step 2: only in {ours}"]


def test_a_file_without_steps_is_not_compared(tmp_path: Path) -> None:
    """Each step of the other file would count as missing there."""
    history, other = tmp_path / "metrics.jsonl", tmp_path / "corpus.jsonl"
    history.write_text(json.dumps({"type": "metrics", "step": 1, "loss": 2.0, "grad_norm": 1.0}) + "\n")
    other.write_text(json.dumps({"text": "a document"}) + "\n")
    with pytest.raises(UserError, match=r"corpus.jsonl: has no step of a training"):
        comparing.compare(history, other)
