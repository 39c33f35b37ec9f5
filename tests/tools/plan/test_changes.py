"""`moba-train plan` judges: memory against a GPU, changes that make it fit, files that are missing."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from moba_train.config.load import load_config
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.memory.devices import Gpu
from moba_train.memory.shortage import usable_bytes
from moba_train.resolve.initial_weights import initial_problems
from moba_train.resolve.run import resolve_unchecked
from moba_train.tools.cli import app
from moba_train.tools.convert.hf_export import hf_config
from moba_train.tools.plan.changes import cheapest_changes, largest_stage
from moba_train.tools.plan.plan import Plan
from moba_train.tools.plan.rates import named_gpu, shipped_rates
from tests.resolved import plan_of

MODELS = Path(__file__).parents[3] / "configs/models"
ON_H200 = ["--gpu", "h200", "--no-data"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """An 8B model on 8 GPUs whose second stage has too many activations for one GPU."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
extends: {MODELS / "llama3-8b.yaml"}
name: large
run_dir: {tmp_path / "run"}
data: {{train: [{{path: {tmp_path / "web"}}}]}}
attention: {{default: full}}
activation_checkpointing: none
batch_tokens: 1M
stages:
  - {{name: short, seq_len: 8K, tokens: 1B, micro_batch_size: 1}}
  - {{name: long, seq_len: 32K, tokens: 1B, micro_batch_size: 2}}
"""
    )
    return path


def plan(recipe: Path, *arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", str(recipe), *arguments])


def test_a_plan_that_does_not_fit_is_refused_with_three_changes_that_fit_when_pasted(recipe: Path) -> None:
    done = plan(recipe, "--gpus", "8", *ON_H200)
    assert done.exit_code == 2
    assert done.output.index("Memory per GPU") < done.output.index("cheapest changes that make it fit")
    assert re.search(r"error: the plan does not fit: stage long needs about \d+\.\d GiB on each GPU, but", done.stderr)
    changes = re.findall(r"^  (\S.*?) +# (\d+\.\d) GiB, time ([+-]\d+)%$", done.output, re.MULTILINE)
    assert len(changes) == 3
    times = [int(time) for arguments, _, time in changes if "--gpus" not in arguments]
    assert times == sorted(times)
    assert any("activation_checkpointing=budget" in arguments for arguments, *_ in changes)
    for arguments, gibibytes, _ in changes:
        gpus = [] if "--gpus" in arguments else ["--gpus", "8"]
        changed = plan(recipe, *shlex.split(arguments), *gpus, *ON_H200)
        assert changed.exit_code == 0, changed.output
        assert f"needs most, {gibibytes} GiB on each GPU" in changed.output


def test_a_plan_that_fits_is_accepted_and_the_gpu_decides(recipe: Path) -> None:
    small = ["activation_checkpointing=full", "--gpus", "8", "--no-data"]
    done = plan(recipe, *small, "--gpu", "h200")
    assert done.exit_code == 0, done.output
    assert "GiB are usable on H200" in done.output
    assert "from the rates of H200 (measured" in done.output
    assert "from the rates of B200 (scaled" in plan(recipe, *small, "--gpu", "B200").output
    assert plan(recipe, *small, "--gpu", "a100-sxm4-40gb").exit_code == 2


def test_without_a_gpu_nothing_is_judged_and_the_option_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = plan(recipe, "--gpus", "8", "--no-data")
    assert done.exit_code == 0, done.output
    assert "memory is compared with none; name one by --gpu" in done.output


def test_the_local_gpu_is_the_default(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.memory.devices.local_gpu", lambda: Gpu("Local GPU", None, 64 * 2**30))
    done = plan(recipe, "--gpus", "8", "--no-data")
    assert done.exit_code == 2
    assert "57.6 GiB are usable on Local GPU (64.0 GiB, of which 10% are kept" in done.stderr
    assert "from the rates of H200" in done.output, "those of an unknown GPU"


def test_changes_of_a_plan_without_times_are_not_called_cheapest(recipe: Path) -> None:
    done = plan(recipe, "--gpus", "8", "--no-data", "--gpu", "h100", "precision.compute=fp32")
    assert done.exit_code == 2
    assert "\nchanges that make it fit" in done.output
    assert "time +" not in done.output


def test_a_plan_by_the_rates_of_another_machine_is_for_its_gpu(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.memory.devices.local_gpu", lambda: Gpu("Local GPU", None, 64 * 2**30))
    rates = recipe.parent / "rates.json"
    for name, memory in (("NVIDIA H200", "126.9 GiB are usable on H200"), ("Local GPU", "57.6 GiB are usable")):
        rates.write_text(shipped_rates(named_gpu("h200")).model_copy(update={"gpu": name}).to_json())
        assert memory in plan(recipe, "--gpus", "8", "--no-data", "--rates", str(rates)).output


def test_where_no_change_fits_the_nearest_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.memory.devices.local_gpu", lambda: Gpu("Small GPU", None, 4 * 2**30))
    done = plan(recipe, "--gpus", "1", "--no-data")
    assert done.exit_code == 2
    assert re.search(r"makes it fit; the nearest:\n  \S.*# \d+\.\d GiB, time", done.output), done.output


def test_an_unknown_gpu_is_refused_with_the_closest_and_all_names(recipe: Path) -> None:
    done = plan(recipe, "--gpu", "h20O", "--no-data")
    assert done.exit_code == 2
    for part in ("--gpu: given 'h20O'", "closest: h200", "allowed: a100, ", "gb200", "l40s"):
        assert part in done.stderr, part
    assert named_gpu("H100 NVL").tflops == 835


def beyond_gpu_gib(recipe: Path, gpu_gib: float, *layout: str) -> dict[str, float]:
    """The GiB that plan says are needed, for each stage that it warns of."""
    budget = ["activation_checkpointing=budget", f"memory.gpu_gib={gpu_gib}"]
    done = plan(recipe, *budget, *layout, *ON_H200)
    assert done.exit_code == 0, done.output
    text = rf"^warning: memory.gpu_gib: given {gpu_gib:g}, but stage (\w+) needs (\S+) GiB on each GPU "
    return {stage: float(needed) for stage, needed in re.findall(text, done.output, re.MULTILINE)}


def test_memory_beyond_gpu_gib_is_named_with_what_would_hold_it(recipe: Path) -> None:
    """Plan does not warn at the GiB that its warning names, and warns at less."""
    found = beyond_gpu_gib(recipe, 20, "--gpus", "8")
    assert found.keys() == {"short", "long"}
    largest = max(found.values())
    assert beyond_gpu_gib(recipe, largest, "--gpus", "8") == {}
    assert beyond_gpu_gib(recipe, largest - 0.2, "--gpus", "8")["long"] == largest


def test_the_fastest_layout_is_held_against_gpu_gib(recipe: Path) -> None:
    assert beyond_gpu_gib(recipe, 20, "--nodes", "1").keys() == {"short", "long"}


@pytest.mark.parametrize("layout", [["--gpus", "8"], ["--nodes", "1"]])
def test_fp8_is_refused_for_a_gpu_without_it_in_the_words_of_a_run(recipe: Path, layout: list[str]) -> None:
    """Emulated FP8 is accepted for every GPU."""
    fp8 = ["precision.linear=fp8", "activation_checkpointing=full", *layout, "--no-data"]
    for name in ("a100", "a100-sxm4-40gb", "a800"):
        done = plan(recipe, *fp8, "--gpu", name)
        assert done.exit_code == 2
        refusal = f"'fp8', which cannot run: {name.upper()} has compute capability 8.0, at least 8.9 needed; "
        assert f"precision.linear: given {refusal}set auto" in done.stderr
    for name, *more in (("h100",), ("b200",), ("a100", "precision.fp8.emulate=true")):
        assert "compute capability" not in plan(recipe, *fp8, *more, "--gpu", name).stderr, name


def test_every_gpu_of_the_table_has_a_compute_capability() -> None:
    assert {name: named_gpu(name).capability for name in ("l40s", "gh200", "h200-nvl", "gb200")} == {
        "l40s": (8, 9),
        "gh200": (9, 0),
        "h200-nvl": (9, 0),
        "gb200": (10, 0),
    }


def test_replicas_become_shards() -> None:
    config = RunConfig.model_validate(
        {
            "name": "demo",
            "run_dir": "runs/demo",
            "model": yaml.safe_load((MODELS / "llama3-8b.yaml").read_text())["model"],
            "data": {"train": [{"path": "a"}]},
            "batch_tokens": "1M",
            "activation_checkpointing": "full",
            "attention": {"default": "full"},
            "parallel": {"dp_replicate": 8, "dp_shard": 1},
            "stages": [{"name": "short", "seq_len": "8K", "tokens": "1B"}],
        }
    )
    gpu = named_gpu("h100")
    first = plan_of(config, 8)
    seen: list[tuple[str, ...]] = []

    def replan(changes: Sequence[str], gpus: int) -> Plan:
        seen.append(tuple(changes))
        if gpus > 8 or changes != ("parallel.dp_replicate=2", "parallel.dp_shard=-1"):
            raise ConfigError(["not here"])
        changed = config.parallel.model_copy(update={"dp_replicate": 2, "dp_shard": -1})
        return plan_of(config.model_copy(update={"parallel": changed}), gpus)

    assert largest_stage(first).memory.total > usable_bytes(gpu)
    (change,) = cheapest_changes(resolve_unchecked(config), first, gpu, replan).fitting
    assert change.arguments == "parallel.dp_replicate=2 parallel.dp_shard=-1"
    assert ("activation_checkpointing=full",) not in seen, "it is on already"


def test_everything_that_is_missing_is_found_at_once(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.idx").write_bytes(b"MMIDIDX")
    (tmp_path / "damaged.bin").write_bytes(b"")
    done = plan(
        recipe,
        f"data.train=[{{path: {tmp_path}/damaged}}]",
        f"stages.1.train=[{{path: {tmp_path}/web}}]",
        f"data.validation=[{{path: {tmp_path}/valid}}]",
        f"data.tokenizer={tmp_path}/tokenizer.model",
        f"init_from={tmp_path}/model",
        "--gpu",
        "h200",
    )
    assert done.exit_code == 2
    assert "error: 5 problems" in done.stderr
    for key in ("data.train[0].path", "stages[1].train[0].path", "data.validation[0].path", "data.tokenizer"):
        assert f"  - {key}: " in done.stderr, key
    assert "  - init_from: " in done.stderr


def test_a_model_folder_without_its_weights_is_found(recipe: Path, tmp_path: Path) -> None:
    model = ModelConfig.model_validate(yaml.safe_load((MODELS / "llama3-8b.yaml").read_text())["model"])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config(model, model.rope, 8192, "bfloat16")))
    found = load_config(recipe, [f"init_from={folder}"])
    (problem,) = initial_problems(found.model, None, folder)
    assert problem.startswith(f"init_from: {folder}")
    assert "safetensors" in problem
    other = found.model.model_copy(update={"layers": 2, "intermediate_size": 64})
    command = f"`moba-train convert hf-to-moba {folder} OUTPUT` writes a recipe"
    assert not any(command in problem for problem in initial_problems(other, None, folder)), (
        "two keys are soon corrected"
    )
    *_, last = initial_problems(other.model_copy(update={"vocab_size": 9}), None, folder)
    assert command in last
