"""A run that begins with the weights of a checkpoint."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from moba_train.checkpoint.recipe import checkpoint_folders
from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from tests.resolved import check
from tests.run.tiny_run import Run


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu() -> Any:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    yield
    os.environ.pop("CUDA_VISIBLE_DEVICES") if before is None else os.environ.update(CUDA_VISIBLE_DEVICES=before)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("source")
    assert Run(folder, corpora).train_here() == 0
    return folder


def begun_from(run: Run, weights: Path) -> Run:
    """`run` begins with `weights`, with the RoPE that they were trained with last."""
    run.recipe["init_from"] = str(weights)
    run.recipe["model"]["rope"] = {"theta": 50000}
    run.recipe["stages"] = [{"name": "on", "seq_len": 128, "tokens": 2 * 512}]
    return run


def test_a_run_goes_on_without_the_folder_it_began_from(source: Path, run: Run) -> None:
    weights = run.folder / "weights"
    shutil.copytree(source / "run", weights)
    assert begun_from(run, weights).train_here() == 0
    shutil.rmtree(weights)
    assert run.train_here(f"stages.0.tokens={3 * 512}") == 0
    assert len(run.losses()) == 3
    config = load_config(run.write_recipe(), [f"checkpoint.fallback_dir={run.folder / 'other'}"])
    own, other = checkpoint_folders(config.run_dir, config.checkpoint.fallback_dir)
    other.parent.mkdir()
    shutil.move(own, other)
    own.mkdir()
    check(config, 1, check_files=True)
    shutil.rmtree(other)
    with pytest.raises(ConfigError, match=r"init_from: given .*there is no such folder"):
        check(config, 1, check_files=True)


def test_weights_with_a_damaged_byte_are_not_trained_on(
    source: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = damaged(source / "run", run.folder / "weights")
    assert begun_from(run, weights).train_here() == 2
    assert "rank_0_0.safetensors: its SHA-256" in capsys.readouterr().err


def damaged(source: Path, weights: Path) -> Path:
    """A copy of the folder, `weights`, in whose newest checkpoint one byte has changed."""
    shutil.copytree(source, weights)
    shard = max(weights.rglob("rank_0_0.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return weights


def test_the_recipe_must_describe_the_weights(source: Path, run: Run) -> None:
    """Every key that differs is named before any process group exists; so is a folder that is none."""
    begun_from(run, source / "run").recipe["model"] |= {"kv_heads": 4, "norm_eps": 1e-6, "rope": {"theta": 10000}}
    with pytest.raises(ConfigError) as error:
        check(load_config(run.write_recipe()), 1, check_files=True)
    for key in ("model.kv_heads: given 4", "model.norm_eps", "model.rope"):
        assert key in str(error.value)
    with pytest.raises(ConfigError, match="init_from"):
        check(load_config(run.write_recipe(), [f"init_from={run.folder}"]), 1, check_files=True)
