"""The smallest forms of the figures really train and evaluate, grow call by call, and are drawn."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import corpus, estimate, work
from experiments.__main__ import main
from experiments.figure import Arm
from experiments.registry import FIGURES
from experiments.trailing import Trailing


@pytest.mark.usefixtures("in_this_process")
def test_figures_train_their_smallest_form_and_grow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    quick = ["--quick", "--gpus", "0", "--seconds", "1e6"]
    assert main(["trailing", *quick, "--arms", "full-tiny"]) == 0
    assert main(["trained-with", *quick, "--arms", "*-tiny"]) == 0  # the same arms, in the same file
    assert "1 arms held, 1 to run" in capsys.readouterr().out
    mixed = ["granularity", "trained-with", "trailing", *quick]
    assert main([*mixed, "--arms", "keys-*", "full-small", "--longest-first"]) == 0
    printed = capsys.readouterr().out
    assert "2 arms held, 1 to run" in printed
    begun = [line.partition(":")[0] for line in printed.splitlines() if ": begins on the CPU" in line]
    assert sorted(begun) == [
        "granularity/keys-32-conv-3-seed0",
        "trailing/full-small-seed0",
    ]
    assert printed.count("3 arms in runs/experiments/trailing-quick.json") == 2, "the figure and the one that shows it"

    trailing = json.loads(Path("runs/experiments/trailing-quick.json").read_text())
    arms = {arm["name"]: arm for arm in trailing["results"]["arms"]}
    assert arms.keys() == {"full-small", "full-tiny", "moba-tiny"}
    full, moba = arms["full-tiny"], arms["moba-tiny"]
    assert full["losses"][-1][1] < full["losses"][0][1]
    assert full["documents"] == "documents of the corpora"
    assert full["compute"]["6ND"] == moba["compute"]["6ND"]
    assert moba["compute"]["real"] < full["compute"]["real"]
    for arm in (full, moba):  # trained with one, run with both
        curves = arm["evaluations"]["both"]["position_wise"]["curves"]
        assert len(curves["full"]["mean"]) == len(curves["moba"]["mean"]) == 8
        assert curves["full"] != curves["moba"]
        own = arm["name"].partition("-")[0]
        trained = arm["stages"]["train"]["position_wise"]["trailing_loss"]
        assert arm["evaluations"]["both"]["position_wise"]["curves"][own]["mean"][-1] == pytest.approx(
            trained, abs=1e-6
        )
    assert main(["granularity", "--plot", "--output", "runs/experiments/granularity-quick.json"]) == 0
    assert "<svg" in Path("runs/experiments/granularity-quick.svg").read_text()

    trailing["settings"]["corpus"]["train"] = "another corpus"
    Path("other.json").write_text(json.dumps(trailing))
    with pytest.raises(SystemExit):
        main(["trailing", *quick, "--output", "other.json"])
    assert "holds results of other settings" in capsys.readouterr().err
    trailing = json.loads(Path("runs/experiments/trailing-quick.json").read_text())
    (tiny,) = (arm for arm in trailing["results"]["arms"] if arm["name"] == "full-tiny")
    del tiny["evaluations"]["both"]
    Path("other.json").write_text(json.dumps(trailing))
    with pytest.raises(SystemExit):
        main(["trailing", *quick, "--output", "other.json"])
    assert "full-tiny-seed0 was run with another recipe, or evaluated otherwise" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arms"),
    [
        ("settings", ["128k-x1"]),
        ("scaling", ["moba-tiny"]),
        ("third-cliff-smaller-blocks", ["none-1", "all-1"]),
        ("third-cliff-lengths", ["last2-128k"]),
        ("short-first", ["short-then-long"]),
        ("why-behind", ["long-moba", "long-window1280", "mixed-full"]),
        ("with-window", ["long-moba_window128"]),
        ("equal-time-rates", ["moba-64k"]),
    ],
)
@pytest.mark.usefixtures("in_this_process")
def test_smallest_forms_that_no_other_test_trains(name: str, arms: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    quick = ["--quick", "--gpus", "0", "--seconds", "1e6", "--arms", *arms]
    assert main([name, *quick]) == 0
    results = json.loads(Path(f"runs/experiments/{name}-quick.json").read_text())["results"]["arms"]
    assert len(results) >= len(arms)
    assert main([name, "--plot", "--output", f"runs/experiments/{name}-quick.json"]) == 0


def test_every_figure_with_arms_of_its_own_is_named_by_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name, figure in FIGURES.items() if not figure.source and f'"{name}"' not in text] == []


@pytest.mark.usefixtures("in_this_process")
def test_a_call_ends_with_what_failed_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arm: Arm, *_: Any) -> Any:
        raise RuntimeError("training ended with status 1, its log is there.log\nOutOfMemoryError")

    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    monkeypatch.setattr(work, "run_arm", fails)
    monkeypatch.setattr(estimate, "modelled_seconds", lambda arm, *_: 50.0 if arm.name == "blocks-4" else 1.0)
    mixed = ["granularity", "scaling", "--quick", "--gpus", "0", "--arms", "full-32k", "blocks-4"]
    assert main([*mixed, "--seconds", "40"]) == 1
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "failed: granularity/full-32k-seed0: training ended with status 1, its log is there.log; the same command runs "
        "it again, --arms 'full-32k-seed0' it alone",
        "not finished: granularity/blocks-4-seed0, about 50 s alone on one device; it would not end within --seconds "
        "40",
        "0 arms in runs/experiments/granularity-quick.json",
        "0 arms in runs/experiments/scaling-quick.json",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_an_arm_whose_package_is_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_package(self: Trailing, seed: int, quick: bool) -> list[Arm]:
        return [replace(arm, package="no_such_module") for arm in arms(self, seed, quick)]

    arms = Trailing.arms
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    monkeypatch.setattr(Trailing, "arms", with_package)
    assert main(["trailing", "--quick", "--gpus", "0", "--arms", "full-tiny"]) == 0
    printed = capsys.readouterr().out
    assert "0 arms held, 0 to run" in printed
    assert "trailing/full-tiny-seed0: left out: the module no_such_module is not installed" in printed
    kda = [arm for arm in FIGURES["mechanisms"].arms(0, quick=False) if arm.name.startswith("kda")]
    assert [arm.package for arm in kda] == ["fla", "fla"]


def test_an_arm_that_is_timed_is_left_out_where_arms_share_a_gpu() -> None:
    timed = [arm for arm in FIGURES["mechanisms"].arms(0, quick=False) if arm.name in ("time-nsa-8k", "nsa-8k")]
    assert [arm.problem(sharing=1) for arm in timed] == ["", ""]
    assert [arm.problem(sharing=2) for arm in timed] == [
        "",
        "its time counts only alone on a GPU (--arms-per-gpu 1)",
    ]


@pytest.mark.usefixtures("in_this_process")
def test_names_and_options_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "QUICK_TOKENS", 1 << 16)
    for arguments, said in (
        (["trailing", "f13"], "NAME: given f13; allowed: settings, scaling,"),
        ([], "NAME is needed; allowed: settings, scaling,"),
        (["trailing", "scaling", "--output", "x.json"], "--output: one file, but figures trailing, scaling were given"),
        (["trailing", "--gpus", "-1"], "--gpus: given -1, torch"),
        (["equal-time", "--seconds-per-arm", "0"], "--seconds-per-arm: given 0, allowed: at least 1"),
        (
            ["scaling", "trailing", "--quick", "--gpus", "0", "--arms", "full-*", "mooba-*"],
            "--arms: given 'mooba-*', which",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_the_arms_of_several_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "trailing", "third-cliff"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| arm | parameters | tokens | minutes on one H100 |") == 2
    assert "| base |" in printed
