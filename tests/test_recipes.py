"""The recipes: each can be planned as its header says, and each miniature trains, here at a fraction of its size."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import data_tools.cli
import moba_train.cli
from data_tools.long_range import write_long_range
from data_tools.train_tokenizer import train_tokenizer
from moba_train.config.load import load_config
from moba_train.train import main

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
VOCAB, SHRINK, TOKENS = 384, 64, 10_000
"""Of the miniatures' lengths 1/64 is left, of their token budgets 1/10000."""


@pytest.mark.parametrize(
    "recipe", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(RECIPES).with_suffix(""))
)
def test_every_recipe_can_be_planned_on_the_gpus_its_header_names(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    command = re.search(r"^# +moba-train (plan \S+(?: \S+=\S+)* --gpus \d+)$", recipe.read_text(), re.MULTILINE)
    assert command, "the header names no plan command"
    arguments = command[1].split()
    assert Path(arguments[1]).resolve() == recipe
    done = CliRunner().invoke(moba_train.cli.app, arguments)
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What launch/miniature.sh makes, of little text."""
    folder = tmp_path_factory.mktemp("mini")
    source = [str(path) for path in (RECIPES.parents[1] / "data_tools").glob("*.py")]
    write_long_range(source, folder / "text.jsonl", 12, 12_000, 0)
    train_tokenizer(source, folder / "tokenizer.model", VOCAB, "text")
    command = ["tokenize", "-i", f"{folder}/text.jsonl", "-t", f"{folder}/tokenizer.model", "-o", f"{folder}/corpus"]
    done = CliRunner().invoke(data_tools.cli.app, [*command, "--holdout", "0.4", "--workers", "1"])
    assert done.exit_code == 0, done.output
    return folder


def smaller(recipe: Path, data: Path, run_dir: Path) -> list[str]:
    """Overrides that make seconds on a CPU of a miniature; stages, their order and their kinds stay as they are."""
    config = load_config(recipe)
    assert config.evaluation.position_wise is not None
    changes: dict[str, Any] = {
        "run_dir": run_dir,
        "data": {
            "tokenizer": f"{data}/tokenizer.model",
            "train": [{"path": f"{data}/corpus-train"}],
            "validation": [{"path": f"{data}/corpus-valid"}],
        },
        "model.vocab_size": VOCAB,
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
        "model.layers": 2,
        "model.heads": 2,
        "model.kv_heads": 1,
        "batch_tokens": config.batch_tokens // SHRINK,
        "optim.schedule.warmup_tokens": 0,
        "optim.schedule.decay_tokens": config.optim.schedule.decay_tokens // TOKENS,
        "attention.moba.block_size": config.attention.moba.block_size // SHRINK,
        "evaluation": {"every": 1000, "sequences": 2},
        "evaluation.position_wise": {"bucket": config.evaluation.position_wise.bucket // SHRINK, "sequences": 2},
        "telemetry.console": False,
        "telemetry.log_every": 1,
    }
    for index, stage in enumerate(config.stages):
        changes[f"stages.{index}.seq_len"] = stage.seq_len // SHRINK
        changes[f"stages.{index}.tokens"] = stage.tokens // TOKENS
        if stage.until:
            changes[f"stages.{index}.until.max_tokens"] = stage.until.max_tokens // TOKENS
        if stage.attention and "moba" in stage.attention.model_fields_set:
            changes[f"stages.{index}.attention.moba.block_size"] = stage.attention.moba.block_size // SHRINK
    return [f"{key}={json.dumps(value, default=str)}" for key, value in changes.items()]


@pytest.mark.parametrize("recipe", sorted((RECIPES / "mini").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_miniature_trains_through_all_its_stages(recipe: Path, corpus: Path, tmp_path: Path) -> None:
    assert main([str(recipe), *smaller(recipe, corpus, tmp_path / "run")]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = [stage.name for stage in load_config(recipe).stages]
    assert [record["stage"] for record in records if record["kind"] == "stage"] == names
    evaluated = {record["stage"] for record in records if record["kind"] == "position_wise"}
    assert evaluated == set(names)
    gated = [stage.name for stage in load_config(recipe).stages if stage.until]
    assert {record["stage"] for record in records if record["kind"] == "gate"} == set(gated)
    assert (tmp_path / "run" / "position_wise.png").exists()
