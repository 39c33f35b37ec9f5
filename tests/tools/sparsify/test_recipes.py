"""Recipes and steps that `moba-train sparsify` writes, before any of them runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from moba_train.config.load import load_config
from moba_train.errors import UserError
from moba_train.tools.sparsify import recipes, steps
from moba_train.tools.sparsify.recipes import Request, Source
from tests.run.tiny_run import Run
from tests.tools.convert.hf_models import make_hf_model
from tests.tools.sparsify.tiny import LENGTH, tiny_request


@pytest.mark.parametrize("name", ["out", "an: output #1", "[out]"])
def test_any_folder_may_be_the_output(project: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    request = tiny_request(model=str(project / "hf"), data=[str(project / "train")])
    source = Source.read(project / "hf")
    evaluation = steps.begin(request, recipes.recipes(request, source, output), output)
    todo = {step.name: step for step in steps.steps(request, source, output, evaluation)}
    train = todo["train sparse 1"]
    assert load_config(train.words[1], train.words[2:]).run_dir == str(train.result)
    (dense,) = (word for word in todo["evaluate sparse 1"].words if word.startswith("evaluation.oracle.dense="))
    assert yaml.safe_load(dense.partition("=")[2]) == str(todo["evaluate full 1"].result)


def test_full_attention_gets_the_sparse_arms_seconds(tmp_path: Path) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    stages = "[{name: dense, seq_len: 8, tokens: 400}, {name: full, seq_len: 8, tokens: 600}]"
    guess = f"# a guess\nextends: full.yaml\nname: equal-seconds\nstages: {stages}\n"
    guesses = {recipes.CALIBRATED: "", recipes.EQUAL_SECONDS: guess}
    (folder / recipes.CALIBRATED).write_text("edited")
    before = guess.replace("tokens: 600", "tokens: 600, lr: 0.5")  # as a version before wrote it
    (folder / recipes.EQUAL_SECONDS).write_text(before)
    for arm, seconds in (("full", 2.0), ("sparse", 3.0)):
        run = tmp_path / "runs" / f"{arm}-1"
        run.mkdir(parents=True)
        records = [
            {
                "time": 0.0,
                "type": "metrics",
                "stage": "s",
                "step": n,
                "tokens": 500 * n,
                "loss": 1.0,
                "step_s": seconds,
                "tokens_per_s": 1.0,
            }
            for n in (1, 2)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    step = steps.Step("train equal-seconds 1", ["train"], tmp_path)
    steps._measured(step, guesses, tmp_path)
    written = yaml.safe_load((folder / recipes.EQUAL_SECONDS).read_text())["stages"]
    assert [(stage["tokens"], stage.get("lr")) for stage in written] == [(600, None), (900, 0.5)]
    single = guess.replace(stages, "[{name: full, seq_len: 8, tokens: 1000}]")  # so did one before
    (folder / recipes.EQUAL_SECONDS).write_text(single)
    steps._measured(step, guesses, tmp_path)
    (stage,) = yaml.safe_load((folder / recipes.EQUAL_SECONDS).read_text())["stages"]
    assert stage["tokens"] == 1500
    less = guess.replace("400", "800").replace("600", "1200")  # the recipe of full attention was edited to half of it
    (folder / recipes.EQUAL_SECONDS).write_text(less)
    steps._measured(step, guesses | {recipes.EQUAL_SECONDS: less}, tmp_path)
    written = yaml.safe_load((folder / recipes.EQUAL_SECONDS).read_text())["stages"]
    assert [stage["tokens"] for stage in written] == [600, 900]
    edited = guess.replace("600", "9M")
    (folder / recipes.EQUAL_SECONDS).write_text(edited)
    steps._measured(step, guesses, tmp_path)
    steps._measured(steps.Step("train sparse 1", ["train"], tmp_path), guesses, tmp_path)
    assert (folder / recipes.EQUAL_SECONDS).read_text() == edited
    assert (folder / recipes.CALIBRATED).read_text() == "edited"


def test_steps_that_were_done_again_count_once_in_a_stage(tmp_path: Path) -> None:
    """Their seconds count: full attention gets them as well."""
    records = [
        {"type": "metrics", "stage": stage, "step": step, "tokens": step, "loss": loss, "step_s": 1, "tokens_per_s": 1}
        for stage, step, loss in [("a", 1, 4), ("a", 2, 9), ("b", 3, 9), ("a", 2, 2), ("b", 3, 5), ("b", 4, 1)]
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"time": 0.0} | one) + "\n" for one in records))
    found = steps.training(tmp_path / "metrics.jsonl")
    assert found["stages"] == {"a": {"steps": 2, "step_s": 1, "loss": 3}, "b": {"steps": 2, "step_s": 1, "loss": 3}}
    assert (found["steps"], found["train_s"]) == (4, 6)


def test_recipes_of_a_call_that_was_killed_are_not_taken_for_those_of_the_next(project: Path, tmp_path: Path) -> None:
    def asked(budget: int) -> tuple[Request, dict[str, str]]:
        request = tiny_request(budget=budget)
        return request, recipes.recipes(request, Source.read(project / "hf"), tmp_path)

    def killed(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    def topk() -> int:
        found: int = yaml.safe_load((tmp_path / "recipes" / "sparse.yaml").read_text())["attention"]["msa"]["topk"]
        return found

    steps.begin(*asked(64), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            steps.begin(*asked(128), tmp_path)
    steps.begin(*asked(128), tmp_path)
    assert topk() == 8
    for step in ("oracle", "calibration"):  # side by side, either may end first
        (tmp_path / step).mkdir()
        (tmp_path / step / "evaluation.json").write_text("{}")
        with pytest.raises(UserError, match="budget: given 64, before 128"):
            steps.begin(*asked(64), tmp_path)
        assert topk() == 8
        shutil.rmtree(tmp_path / step)


def test_an_arm_that_was_evaluated_before_full_attention_is_evaluated_again(tmp_path: Path) -> None:
    evaluation: dict[str, Any] = {name: {"budgets": []} for name in ("position_wise", "needle", "ruler", "oracle")}
    alone, compared = (steps.evaluation_of("sparse-1", tmp_path, evaluation, dense) for dense in (None, "full-1"))
    alone.result.parent.mkdir(parents=True)
    for step, done in ((alone, [True, False]), (compared, [True, True])):
        alone.result.write_text(json.dumps({"options": {"overrides": step.words[6:]}}))
        assert [alone.done, compared.done] == done


@pytest.mark.parametrize(("kind", "choosing"), [("msa", "oracle"), ("moba", "moba")])
def test_layers_are_chosen_with_the_gate_unless_it_has_to_learn_first(project: Path, kind: str, choosing: str) -> None:
    request = tiny_request(kind=kind)
    source = Source.read(project / "hf")
    texts = recipes.recipes(request, source, Path("out"))
    evaluation = yaml.safe_load(texts[recipes.EVALUATION])["evaluation"]
    calibrate = next(step for step in steps.steps(request, source, Path("out"), evaluation) if step.name == "calibrate")
    assert f'attention.default="{choosing}"' in calibrate.words
    for word in calibrate.words:
        if word.startswith(f"attention.{kind}="):
            assert json.loads(word.partition("=")[2]) == recipes.selects(kind, 16, 4)
    assert [stage["name"] for stage in yaml.safe_load(texts[recipes.SPARSE])["stages"]][-1] == "sparse"


def test_a_model_of_one_layer_is_refused(project: Path) -> None:
    source = Source.read(project / "hf")
    one = Source(source.model.model_copy(update={"layers": 1}), LENGTH, {"default": "full"}, "tokenizer")
    request = Request(model="hf", data=["t"], validation=["v"], length=LENGTH, budget=64, tokens=4096, kind="moba")
    with pytest.raises(UserError, match=r"hf: given 1 layers without a window; allowed: two or more"):
        recipes.full_count(request, one)


def test_a_model_keeps_its_windows(project: Path) -> None:
    source = Source.read(project / "hf")
    windowed = Source(source.model, LENGTH, {"default": "full", "overrides": {1: {"kind": "window"}}}, "tokenizer")
    request = tiny_request(kind="moba")
    texts = {name: yaml.safe_load(text) for name, text in recipes.recipes(request, windowed, Path("out")).items()}
    assert texts[recipes.BASE]["attention"]["overrides"] == {1: {"kind": "window"}}
    assert texts[recipes.SPARSE]["stages"][0]["distill"]["teacher"] == "full_and_windows"
    evaluation = texts[recipes.EVALUATION]["evaluation"]
    oracle, calibrate, *_ = steps.steps(request, windowed, Path("out"), evaluation)
    for step in (oracle, calibrate):
        # A recipe of Hugging Face's may have windows by default and full layers as overrides.
        assert 'attention.overrides={"1": {"kind": "window"}}' in step.words
    with pytest.raises(UserError, match=r"evaluation\.oracle: given None; allowed: its section"):
        next(steps.steps(request, windowed, Path("out"), evaluation | {"oracle": None}))


@pytest.mark.parametrize(("family", "kind"), [("gemma2", "capped"), ("qwen3_next", "gdn")])
def test_a_model_of_other_layers_is_refused(family: str, kind: str, tmp_path: Path) -> None:
    """Both arms would lose Gemma 2's cap and windows."""
    make_hf_model(family, tmp_path / "hf")
    with pytest.raises(UserError, match=rf"hf: given layers of kind {kind}; allowed: full, window, and kinds"):
        Source.read(tmp_path / "hf")


def test_a_checkpoint_of_linear_attention_is_refused(run: Run) -> None:
    """Without projections of their own, its layers would train with full attention, on weights that are not for it."""
    del run.recipe["evaluation"]
    run.recipe["attention"] = {"default": "lightning"}
    run.recipe["stages"] = [{"name": "one", "seq_len": 128, "tokens": 1024}]
    assert run.train_here() == 0
    with pytest.raises(UserError, match="given layers of kind lightning; allowed"):
        Source.read(run.run_dir)
