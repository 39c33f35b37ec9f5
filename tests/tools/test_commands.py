"""`moba-train verify`, `eval` and `generate` on a trained run."""

import shutil
from pathlib import Path

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.tools.cli import app
from tests.commands import run_app
from tests.run.tiny_run import VOCAB, Run


def test_eval_repeats_the_loss_of_the_training_run(finished_run: Run) -> None:
    """On one rank what two ranks measured, and with full attention on the same weights."""
    output = run_app(app, "eval", finished_run.run_dir).output
    trained, full = (float(line.split()[-4]) for line in output.splitlines() if "validation loss" in line)
    rounding = 2e-2 if torch.cuda.is_available() else 1e-4  # the run was on the CPU; evaluation takes bf16 on a GPU
    assert trained == pytest.approx(finished_run.records("validation_loss")[-1]["eval_loss"], abs=rounding)
    assert full != trained


def test_verify_names_the_damaged_file(finished_run: Run, tmp_path: Path) -> None:
    run_app(app, "verify", finished_run.run_dir)
    copy = tmp_path / "copy"
    shutil.copytree(finished_run.run_dir / "checkpoints" / "step_00000012", copy)
    (copy / ".DS_Store").touch()
    output = run_app(app, "verify", copy).output
    assert "not in the manifest, never read: '.DS_Store'" in output
    shard = next(copy.glob("rank_1_*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = run_app(app, "verify", copy, code=2).output
    assert shard.name in output

    # Of a run, the newest, also where training would pass over it.
    run = shutil.copytree(finished_run.run_dir, tmp_path / "run")
    manifest = run / "checkpoints" / "step_00000012" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    output = run_app(app, "verify", run, code=2).output
    assert "step_00000012" in output


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for command in (["verify"], ["eval"], ["generate", "--prompt", "x"]):
        output = run_app(app, *command[:1], tmp_path, *command[1:], code=2).output
        assert str(tmp_path) in output.replace("\n", "")


def test_generate_needs_a_tokenizer(finished_run: Run) -> None:
    output = run_app(app, "generate", finished_run.run_dir, "--prompt", "x", code=2).output
    assert "data.tokenizer" in output


def test_the_resolved_recipe_in_the_run_folder_is_a_recipe(finished_run: Run) -> None:
    config = load_config(finished_run.run_dir / "config.yaml")
    assert config.model.vocab_size == VOCAB
    assert config.stages[0].attention is not None
    assert config.stages[0].attention.default == "full"


def test_another_attention_of_new_tokens_is_refused() -> None:
    output = run_app(app, "generate", "nowhere", "--prompt", "x", "--decode", "sparse", code=2).output
    assert "'sparse' is not one of 'full', 'own'" in " ".join(output.replace("│", " ").split())
