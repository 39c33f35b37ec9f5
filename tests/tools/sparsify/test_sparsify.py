"""`moba-train sparsify` on a tiny model of Hugging Face's: all steps, a call that goes on, and what it refuses."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from benchmarks import oracle_split, sparsify_ablations, sparsify_tables
from moba_train.config.load import load_config
from moba_train.config.mesh import WorldSize
from moba_train.errors import UserError
from moba_train.resolve.recipe import resolve
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.cli import app
from moba_train.tools.sparsify import page, recipes, steps
from moba_train.tools.sparsify.recipes import Request, Source
from tests.tools.sparsify.tiny import SMALL, call, words


@pytest.fixture(scope="module")
def made(project: Path) -> Path:
    """The folder that a call leaves; the first try failed after the sparse arm's first step, the second went on."""
    run_here = steps.run_here

    def dies(given: Sequence[str]) -> int:
        return 9 if "seed=1" in given and "sparse" in given[1] else run_here(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        patch.setattr(steps, "run_here", dies)
        code, output = call()
        assert code == 2
        assert "the step 'train sparse 1' ended with status 9; the same command goes on with it" in output
        patch.setattr(steps, "run_here", run_here)
        code, output = call()
        assert code == 0, output
    assert "train full 1: done before" in output
    return project / "out"


def test_every_step_leaves_its_result(made: Path) -> None:
    found = json.loads((made / "summary.json").read_text())
    assert [*found["seconds"]] == [
        "extend",
        "oracle",
        "calibrate",
        "train full 1",
        "train sparse 1",
        "evaluate full 1",
        "evaluate sparse 1",
        "export",
    ]
    full, sparse = (found["arms"][arm][0] for arm in ("full", "sparse"))
    assert full["tokens"] == sparse["tokens"]
    assert full["trailing_full"] is None
    assert sparse["trailing_full"] is not None
    assert sparse["errors"].keys() == {"budget", "selector", "weights"}
    assert (made / "model" / "config.json").is_file()


def test_the_summary_has_what_errors_of_a_difference_are_computed_from(made: Path) -> None:
    arms = json.loads((made / "summary.json").read_text())["arms"]
    for arm, (one,) in arms.items():
        records = [
            one for one in read_records(made / "runs" / f"{arm}-1" / "metrics.jsonl") if one["type"] == "metrics"
        ]
        assert [*one["stages"]] == ["dense", arm]
        for stage, found in one["stages"].items():
            losses = [each.get("cross_entropy", each["loss"]) for each in records if each["stage"] == stage]
            assert (found["steps"], found["loss"]) == (len(losses), pytest.approx(statistics.mean(losses)))
            assert found["step_s"] > 0
        assert len(one["trailing_by_sequence"]) == len(one["trailing_documents"]) == 2
        assert statistics.mean(one["trailing_by_sequence"]) == pytest.approx(one["trailing"], abs=1e-4)
        assert {key: statistics.mean(of) for key, of in one["needle_by_depth"].items()} == one["needle_by_length"]
        counted = [[row.count("1") / len(row) for row in rows] for rows in one["needle_outcomes"]]
        assert counted == [*one["needle_by_depth"].values()]
    assert arms["sparse"][0]["stages"]["sparse"]["loss"] == pytest.approx(
        arms["full"][0]["stages"]["full"]["loss"], rel=0.1
    )


def test_the_sparse_arm_keeps_the_calibrated_layers_full_and_distils(made: Path) -> None:
    chosen = json.loads((made / "calibration" / "evaluation.json").read_text())["full_layers"]["chosen"]
    config = load_config(made / "runs" / "sparse-1" / "config.yaml")
    assert config.attention.full_layers == chosen
    dense, sparse = config.stages
    assert dense.trainable == sparse.trainable == "all"  # the model loses no tokens while the scorer learns
    assert sparse.given_members.keys() == {"distill"}
    full = load_config(made / "runs" / "full-1" / "config.yaml")
    assert config.optim == full.optim.model_copy(update={"lr_factors": {"*.attention.*msa.*": 10.0}})
    assert {stage.lr for stage in (dense, sparse, *full.stages)} == {None}  # one schedule over both stages
    # One norm clips all gradients: the scorer's, of some nats in each layer, must not fill it.
    options = [layer.options.model_dump() for layer in resolve(config, WorldSize(1, 1)).stages[-1].attention]
    scorers = [(one["kl_weight"], one["kl_every"], one["index_keys"]) for one in options if "kl_weight" in one]
    assert scorers == [(0.1, 8, "group")] * (config.model.layers - len(chosen))
    assert config.model.rope.theta == load_config(made / "runs" / "extend" / "config.yaml").stages[0].rope.theta  # type: ignore[union-attr]
    assert "full attention's numbers" not in (made / "recipes" / "calibrated.yaml").read_text()


def test_both_arms_read_the_same_batches(made: Path) -> None:
    """A stage shuffles its own part of the corpora: the arm with full attention has the other's stages."""
    runs = [made / "runs" / name for name in ("sparse-1", "full-1")]
    sparse, full = ([(one.seq_len, one.tokens) for one in load_config(run / "config.yaml").stages] for run in runs)
    assert sparse == full
    first = [next(one for one in read_records(run / "metrics.jsonl") if one["type"] == "metrics") for run in runs]
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-5)  # full attention, and the same weights


def test_the_report_has_every_table_and_the_commands(made: Path) -> None:
    written = (made / "report.html").read_text()
    for text in ("after equal tokens", "the sparse arm", "the budget costs", "stay full", "tokens/s", "full_layers:"):
        assert text in written
    assert "full attention finds no needle to compare with. This is 1 seed; a claim takes three." in written
    assert "nan" not in written
    links = re.findall(r'href="([^"]+)"', written)
    assert {"oracle/evaluation.html", "evaluation/sparse-1/evaluation.html"} <= {*links}
    assert all((made / link).is_file() for link in links)
    assert "moba-train train out/recipes/sparse.yaml seed=1" in written
    assert "trust_remote_code=True" in written


def test_full_attention_of_equal_seconds_is_compared_as_well() -> None:
    def arm(needle: float, trailing: float) -> list[dict[str, float]]:
        return [{"needle": needle, "trailing": trailing, "ruler": 0.5}] * 3

    arms = {"full": arm(0.8, 1.0), "sparse": arm(0.79, 1.009), "equal-seconds": arm(0.9, 0.99)}
    tokens, seconds = page.verdict({"arms": arms}).split("Sparse attention finds ")[1:]
    assert tokens.startswith("0.790 of the needles, and full attention, trained on the same tokens, 0.800.")
    assert "0.0090 nats above full attention's" in tokens
    assert tokens.endswith("is met. ")
    assert "for as many seconds, 0.900." in seconds
    assert seconds.endswith("is not met. These are means over 3 seeds.")


def test_programs_print_the_tables_and_draw_the_split(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call_program(main: Callable[[], None], *given: str) -> tuple[str, list[dict[str, Any]]]:
        monkeypatch.setattr("sys.argv", ["program", *given, "--output", str(tmp_path / "result.json")])
        main()
        results: list[dict[str, Any]] = json.loads((tmp_path / "result.json").read_text())["results"]
        return capsys.readouterr().out, results

    printed, (summary,) = call_program(sparsify_tables.main, str(made / "summary.json"))
    assert "full attention finds no needle to compare with. This is 1 seed; a claim takes three." in printed
    assert f"| sparse | {summary['arms']['sparse'][0]['trailing']:.4f} | " in printed
    files = {"before": made / "oracle", "sparse": made / "evaluation" / "sparse-1"}
    named = [f"{name}={folder / 'evaluation.json'}" for name, folder in files.items()]
    printed, rows = call_program(oracle_split.main, *named, "--plot", str(tmp_path / "split.svg"))
    assert [row["model"] for row in rows] == ["before", "before", "sparse"]
    assert rows[0]["loss"]["weights"] is None
    errors = json.loads((made / "evaluation" / "sparse-1" / "evaluation.json").read_text())["oracle"]
    assert rows[2]["loss"] == errors["budgets"][0]["loss"] | {"weights": errors["weights"]["loss"]}
    assert printed.count("| 16/4 group, first + previous | 64 |") == 2
    assert "nats above full attention" in (tmp_path / "split.svg").read_text()


@pytest.mark.parametrize("group", [False, True])
def test_every_ablation_has_the_budget_and_the_tokens_of_the_sparse_arm(
    project: Path, tmp_path: Path, group: bool
) -> None:
    request = Request(
        model="hf", data=["train"], validation=["valid"], length=32_768, budget=4096, tokens=15_000_000, kind="msa"
    )
    (tmp_path / "recipes").mkdir()
    for name, text in recipes.recipes(request, Source.read(project / "hf"), tmp_path).items():
        (tmp_path / "recipes" / name).write_text(text)
    if group:
        part = {"groups": [0], "kind": "msa", "options": recipes.selects("msa", 128, 32)}
        fragment = {"full_layers": [], "overrides": {1: {"kind": "by_group", "parts": [part]}}}
        (tmp_path / "recipes" / recipes.CALIBRATED).write_text(yaml.safe_dump({"attention": fragment}))
    recipe = tmp_path / "recipes" / "sparse.yaml"
    steps_of_arm = resolve(load_config(recipe), WorldSize(1, 1)).stages[-1].end_step
    arms = sparsify_ablations.arms_of(tmp_path)
    assert len(arms) == 18
    small = yaml.safe_load((tmp_path / "recipes" / recipes.SPARSE).read_text())
    blocks_of_64 = {"seer", *(name for name in arms if name.startswith("moba"))}
    for size, topk, too_small in ((16, 4, set()), (16, 3, {"double-blocks"}), (1, 64, {"half-blocks"})):
        small["attention"]["msa"] |= {"block_size": size, "topk": topk}
        assert {*arms} - {*sparsify_ablations.ablations(small, 131_072, 1, {})} == blocks_of_64 | too_small
    for name, overrides in arms.items():
        config = load_config(recipe, overrides)
        run = resolve(config, WorldSize(1, 1))
        same_batches = [stage.tokens for stage in config.stages] == [one.tokens for one in load_config(recipe).stages]
        assert same_batches == (name != "sparse-quarter"), name
        assert sum(stage.tokens for stage in config.stages) == sum(stage.tokens for stage in load_config(recipe).stages)
        assert run.stages[-1].end_step == steps_of_arm, name
        own = next(layer for layer in run.stages[-1].attention if layer.kind not in ("full", "by_group"))
        sizes = own.options.model_dump()
        assert sizes["block_size"] * sizes["topk"] == 4096, name
        parts = [layer.options.parts[0] for layer in run.stages[-1].attention if layer.kind == "by_group"]  # type: ignore[attr-defined]
        assert bool(parts) == (group and name not in ("last-layers", "no-full-layers")), name
        assert [(part.kind, part.options) for part in parts] == [(own.kind, own.options)] * len(parts), name


def test_ablations_train_in_the_folder_of_the_command(
    project: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    ran: list[str] = []
    monkeypatch.setattr(steps, "run_here", lambda words: steps_of(words, ran))
    output = project / "ablations.json"
    with pytest.raises(UserError, match="'train no-distillation 1' stopped before its end"):
        sparsify_ablations.run(made, ["no-distillation"], 1, output)
    assert ran == ["train"]
    results = json.loads(output.read_text())["results"]
    assert [one["name"] for one in results] == ["full", "sparse"]
    lines = sparsify_ablations.table(results)
    assert lines[1].split()[:2] == ["full", "+0.0000"]
    assert float(lines[2].split()[1]) == pytest.approx(results[1]["trailing"] - results[0]["trailing"], abs=1e-4)


def steps_of(words: Sequence[str], ran: list[str]) -> int:
    """Stands for a command, of which nothing comes."""
    ran.append(words[0])
    return 0


def test_a_run_may_be_made_sparse_again(
    project: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever attention its stages have, the oracle and the calibration see full attention and the ideal one."""
    monkeypatch.chdir(project)
    run_here = steps.run_here
    monkeypatch.setattr(steps, "run_here", lambda words: run_here(words) if words[0] == "eval" else 9)
    run = made / "runs" / "sparse-1"
    given = words(output=tmp_path / "again")
    given[given.index("hf")] = str(run)
    done = CliRunner().invoke(app, [*given, *SMALL])
    assert "the step 'train full 1' ended with status 9" in done.output
    attentions = json.loads((tmp_path / "again" / "oracle" / "evaluation.json").read_text())["oracle"]["attentions"]
    assert not attentions.keys() & {"msa", "moba"}
    layers = json.loads((tmp_path / "again" / "calibration" / "evaluation.json").read_text())["full_layers"]["layers"]
    assert [row["layer"] for row in layers] == [0, 1, 2]


def test_a_second_call_adds_only_what_is_new(project: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    ran: list[str] = []
    monkeypatch.setattr(steps, "run_here", lambda given: steps_of(given, ran))
    code, output = call("--seeds", "2")
    assert code == 2
    assert "stopped before its end" in output
    assert ran == ["train"], "seed 2 of full attention"
    code, output = call(budget=128)
    assert code == 2
    assert "budget: given 128, before 64" in output
    assert yaml.safe_load((made / "request.yaml").read_text())["budget"] == 64


def test_results_of_another_machine_are_enough_without_its_weights(
    project: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report needs numbers alone. Another seed needs the extension as well, which runs once more when its folder is
    removed, as for every step."""
    copy = shutil.copytree(project, tmp_path / "here", ignore=shutil.ignore_patterns("checkpoints", "model"))
    (copy / "out" / "report.html").unlink()
    monkeypatch.chdir(copy)
    run_here = steps.run_here
    ran: list[str] = []

    def extends(given: Sequence[str]) -> int:
        ran.append(Path(given[1]).name)
        return run_here(given) if given[1].endswith(recipes.EXTEND) else 9

    monkeypatch.setattr(steps, "run_here", extends)
    code, output = call()
    assert code == 0, output
    assert "export: left out, as its weights are on another machine" in output
    assert ran == []
    assert (copy / "out" / "report.html").is_file()
    shutil.rmtree(copy / "out" / "runs" / "extend")
    code, output = call("--seeds", "2", "--equal-seconds")
    assert code == 2
    assert "the step 'train equal-seconds 1' ended with status 9" in output
    assert ran == [recipes.EXTEND, recipes.EQUAL_SECONDS], "its tokens follow from the seconds of runs without weights"


def test_the_plan_is_printed_and_nothing_is_written(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    code, output = call("--dry-run", "--equal-seconds", output=tmp_path / "new")
    assert code == 0, output
    names = re.findall(r"^\d+\. ([^:]+): moba-train", output, re.MULTILINE)
    assert names[:3] == ["extend", "oracle", "calibrate"]
    assert names[-1] == "export"
    assert len(re.findall("planned:", output)) == 4
    if not torch.cuda.is_available():
        assert "Planned for 1 x H200 (this machine has no GPU), by the rates of H200" in output
    assert [*re.findall(r"^--- .*/(\S+\.yaml)$", output, re.MULTILINE)] == [
        recipes.BASE,
        recipes.EVALUATION,
        recipes.EXTEND,
        recipes.CALIBRATED,
        recipes.SPARSE,
        recipes.FULL,
        recipes.EQUAL_SECONDS,
    ]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "lightning"}, "--kind: given lightning; allowed: .*msa"),
        ({"kind": "mas"}, "--kind: given mas; allowed: .*msa"),
        ({"budget": 60}, "--budget: given 60; allowed: a multiple of --block-size 16"),
        ({"budget": 512}, "--budget: given 512; allowed: fewer than the 512 tokens of --length"),
        ({"full-layers": 3}, "--full-layers: given 3; allowed: fewer than the model's 3 layers"),
        ({"tokens": 600}, "--tokens: given 600; allowed: at least"),
        ({"data": "nothing"}, "nothing.*idx"),
        ({"lr": 0, "seeds": 101}, "--seeds: given 101; allowed: .*--lr: given 0.0; allowed: number > 0"),
        ({"rope-theta": 1}, "--rope-theta: given 1.0; allowed: number > 1"),
        ({"length": 1000}, "--length: given 1000; allowed: a multiple of 16"),
        ({"validation": "short"}, "--validation: given no document longer than --length 512"),
        ({"kind": "moba_window"}, "--budget: given 64, but with --kind moba_window a query attends to 512; allowed"),
        ({"kind": "nsa"}, "attention.nsa.block_size: given 16 in layers"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    project: Path, options: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    for how in ([], ["--dry-run"]):
        code, output = call(*how, **{"output": tmp_path / "new", **options})
        assert code == 2, output
        assert re.search(problem, " ".join(output.split()))


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("evaluation.needle.sample=4", "evaluation.needle.sample: unknown key"),
        ("evaluation.full_layers.lengths=[30]", "evaluation.full_layers.lengths: given 30"),
        ("evaluation.oracle.bucket=100", "evaluation.oracle.bucket: given 100, which does not divide"),
        ("seed=3", "override 'seed=3': runs have the seeds 1 to --seeds"),
        ("optim.lr=1", "override 'optim.lr=1': give --lr"),
        ("attention.default=qsa", "override 'attention.default=qsa': give --kind"),
        ("attention={default: nothing}", "attention.default: 'nothing' is not a registered"),
        ("stages=[]", "stages: given []; allowed: non-empty list"),
    ],
)
def test_overrides_that_fail_late_or_change_nothing_are_refused(
    project: Path, override: str, problem: str, how: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(steps, "run_here", lambda words: 9)
    code, output = call(override, *how, output=tmp_path / "new")
    assert code == 2
    assert problem in " ".join(output.split())


def test_a_batch_has_a_sequence_for_every_rank(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(project)
    code, output = call("--dry-run", "--gpus", "2", output=tmp_path / "new", tokens="1M")
    assert code == 0, output
    assert "Planned for 2 x " in output


def test_a_call_that_was_refused_leaves_no_choice_behind_and_an_edited_recipe_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert call(data="nothing", output=tmp_path / "new")[0] == 2
    monkeypatch.setattr(steps, "run_here", lambda words: 9)
    code, output = call(output=tmp_path / "new")
    assert code == 2
    assert "the step 'extend' ended with status 9" in output
    assert "stay as they are" not in output
    base = tmp_path / "new" / "recipes" / "base.yaml"
    assert yaml.safe_load(base.read_text())["data"]["train"] == [{"path": "train"}]
    base.write_text(base.read_text() + "# edited\n")
    assert "stay as they are: base.yaml\n" in call(output=tmp_path / "new")[1]


def test_a_model_that_no_export_can_hold_stays_a_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    export = steps.Step("export", ["convert", "moba-to-hf"], tmp_path / "model" / "config.json")
    steps.run_steps([export], {}, tmp_path, lambda words: 2, said.append)
    assert said[-1] == "the model stays a checkpoint, as no export can hold it"


def test_on_several_gpus_each_command_is_a_process_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its place runs one that SIGTERM ends with another code, which `run_command` passes on."""
    started: list[Sequence[str]] = []
    start = subprocess.Popen
    program = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint(flush=True)\n"

    def popen(command: Sequence[str]) -> subprocess.Popen[bytes]:
        started.append(command)
        stops = command[3] == "eval"
        code = program + ("time.sleep(60)" if stops else "sys.exit(3)")
        process = start([sys.executable, "-c", code], stdout=subprocess.PIPE)
        if stops:
            assert process.stdout is not None
            process.stdout.readline()  # from now on the signal does not kill it
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    before = signal.getsignal(signal.SIGTERM)
    for command, status in (("train recipe.yaml", 3), ("eval run", 5), ("convert moba-to-hf run model", 3)):
        assert steps.run_command(command.split(), 2) == status
    assert signal.getsignal(signal.SIGTERM) == before
    assert [" ".join(command[3:]) for command in started] == [
        "train recipe.yaml --gpus 2",
        "eval run --gpus 2",
        "convert moba-to-hf run model",
    ]


def test_a_kind_without_rates_is_planned_without_advice_that_the_command_does_not_take(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(project)
    code, output = call("--dry-run", output=tmp_path / "new", kind="qsa")
    assert code == 0, output
    assert "planned: attention kind 'qsa' has no measured time on H200" in output
    assert "--rates" not in output
