"""A run that goes from full attention to InfLLM-V2 or to MoBA with a window: resumed inside the sparse stage, planned,
exported."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from moba_train.memory.flops import layer_flops
from moba_train.model.build import build_attention
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.saved_recipe import open_checkpoint
from tests.resolved import check, stages_of
from tests.run.tiny_run import Run, assert_same_tensors

SIZES = {"block_size": 16, "topk": 3, "local_blocks": 1, "window": 8, "stride": 4, "dense_len": 32}


def sparse(run: Run, folder: Path, kind: str = "infllm_v2", options: dict[str, Any] = SIZES) -> Run:
    """The run in this folder, its second stage with this kind in all layers."""
    other = Run(folder, run.folder)
    other.folder.mkdir()
    attention = {"default": kind, kind: options}
    other.recipe = {
        **run.recipe,
        "run_dir": str(folder / "run"),
        "evaluation": {"sequences": 2},
        "attention": attention,
    }
    other.recipe |= {"batch_tokens": 256, "stages": [{**stage, "tokens": 2 * 256} for stage in run.recipe["stages"]]}
    return other


@pytest.mark.parametrize(
    ("kind", "options"), [("infllm_v2", SIZES), ("moba_window", {"block_size": 16, "topk": 2, "window": 32})]
)
def test_a_run_resumes_bitwise_inside_the_sparse_stage(
    kind: str, options: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    whole, stopped = (sparse(run, tmp_path / name, kind, options) for name in ("whole", "stopped"))
    assert whole.train_here() == 0
    stopped.train_here("--stop-at-step", "3")
    assert stopped.train_here() == 0
    assert stopped.losses() == whole.losses()
    assert_same_tensors(stopped.newest_checkpoint, whole.newest_checkpoint)

    export_to_hf(open_checkpoint(whole.run_dir), tmp_path / "exported", torch.float32, 2**30)
    config = (tmp_path / "exported" / "config.json").read_text()
    assert f'"kind": "{kind}"' in config
    name, value = [*options.items()][-1]
    assert f'"{name}": {value}' in config


def test_the_plan_counts_its_flops(run: Run, tmp_path: Path) -> None:
    config = load_config(sparse(run, tmp_path / "plan").write_recipe())
    check(config)
    layer = stages_of(config)[1].attention[0]
    (kind,) = build_attention([layer], 8)
    pairs = kind.pairs(config.model, [100, 28])
    assert pairs < (100**2 + 28**2) / 2
    assert layer_flops(config.model, layer, [100, 28]) == 12 * 32 * pairs + 2 * 32 * 100**2 / 2 / 4


def test_training_with_infllm_is_refused_with_the_way_to_use_it(run: Run) -> None:
    run.recipe["stages"][1]["attention"] = {"overrides": {0: {"kind": "infllm"}}}
    with pytest.raises(ConfigError, match=r"stages\[1\]\.attention\.infllm\.kind: given 'infllm' in layer 0.*RUN"):
        check(load_config(run.write_recipe()))
