"""Native Sparse Attention in a run: plan, resume, refusals."""

from pathlib import Path

import pytest
import torch

from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from moba_train.model.build import build_model
from moba_train.tools.cli import app
from tests.commands import run_app
from tests.resolved import check, plan_of, spec_of
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks, train_traced

OPTIONS = {"compressed_block": 4, "stride": 2, "block_size": 8, "topk": 4, "window": 6}


def nsa_run(folder: Path, corpora: Path) -> Run:
    """Full attention, then NSA in the first layer and MoBA in the second."""
    folder.mkdir(exist_ok=True)
    run = Run(folder, corpora)
    run.recipe["attention"]["nsa"] = OPTIONS
    run.recipe["stages"][1]["attention"] = {"full_layers": "none", "overrides": {0: {"kind": "nsa"}}}
    return run


def test_a_run_resumes_bitwise_and_is_not_exported(tmp_path: Path, corpora: Path) -> None:
    whole, resumed = (nsa_run(tmp_path / name, corpora) for name in ("whole", "resumed"))
    assert whole.train_here() == 0
    resumed.take_over(whole, 8)
    assert resumed.train_here() == 0
    assert resumed.losses() == whole.losses()
    assert whole.losses()[-1] < whole.losses()[6] - 0.1
    assert_same_tensors(resumed.newest_checkpoint, whole.newest_checkpoint)
    result = run_app(app, "convert", "moba-to-hf", whole.run_dir, tmp_path / "out", code=2)
    assert "kind 'nsa' has 3168 parameters in a layer" in result.output


def test_a_compiled_layer_shares_its_sequences(tmp_path: Path, corpora: Path, ranks: Ranks) -> None:
    alone, shared = (nsa_run(tmp_path / name, corpora) for name in ("alone", "shared"))
    for run in (alone, shared):
        run.recipe["model"]["layers"] = 1
        run.recipe["stages"] = [run.recipe["stages"][1] | {"tokens": 3 * 512}]
        run.use_short_documents()
    ranks.train(alone, 1)
    parallel = {"cp": 2, "cp_layout": "zigzag"}  # contiguous shards would have whole documents
    shared.recipe |= {"compile": True, "activation_checkpointing": "full", "parallel": parallel}
    ranks.work(train_traced, [str(shared.write_recipe())], 2)
    assert shared.losses() == pytest.approx(alone.losses(), rel=1e-4)
    assert shared.losses()[-1] < shared.losses()[0]


def test_the_plan_counts_its_parameters_exactly(tmp_path: Path, corpora: Path) -> None:
    config = load_config(nsa_run(tmp_path, corpora).write_recipe())
    hidden_size, heads, kv_heads, width = 32, 4, 2, 8
    compression = 4 * width + (4 * width + 1) * width + (width + 1) * width
    want = 2 * compression + hidden_size * 3 * heads + 4 * hidden_size * kv_heads * width
    plan = plan_of(config, 1)
    assert plan.parameters.attention_kinds == want
    with torch.device("meta"):
        assert plan.parameters.total == sum(x.numel() for x in build_model(spec_of(config)).parameters())


def test_tensor_parallelism_is_refused(tmp_path: Path, corpora: Path) -> None:
    run = nsa_run(tmp_path, corpora)
    run.recipe["parallel"] = {"tp": 2}
    with pytest.raises(ConfigError, match=r"parallel\.tp: given 2, but kind 'nsa'"):
        check(load_config(run.write_recipe()))
