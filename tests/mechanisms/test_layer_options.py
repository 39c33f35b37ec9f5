"""A model whose layers have windows, sinks, gated outputs, norms on both sides, factors and their own rotary embeddings
trains on ranks as on one device, resumes bit by bit, and is planned as it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moba_train.attention.layout import packed_layout
from moba_train.config.load import load_config
from moba_train.errors import ConfigError
from moba_train.memory.flops import matmul_flops
from moba_train.model.build import build_attention, build_model
from moba_train.model.rope import rope_cos_sin
from moba_train.model.spec import attention_matrices
from moba_train.model.transformer import Transformer
from moba_train.parallel.activations import Kept
from moba_train.tools.convert.hf import export_to_hf
from moba_train.tools.saved_recipe import open_checkpoint
from tests.resolved import check, estimate_of, plan_of, spec_of
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import Ranks

OPTIONS: dict[str, Any] = {
    "norms": "both",
    "centered_norms": True,
    "qk_norm": True,
    "activation": "gelu_tanh",
    "embedding_scale": 2.0,
    "attention_scale": 0.2,
    "residual_scale": 0.5,
    "logits_divisor": 2.0,
    "sink_layers": "all",
    "output_gate": "head",
    "gate_layers": "last:1",
    "rope": {"overrides": {"every:2": {"kind": "nope"}}},
}


def with_options(folder: Path, corpora: Path, **parallel: int) -> Run:
    run = Run(folder, corpora)
    run.recipe["model"] |= OPTIONS
    run.recipe["parallel"] = parallel
    window = {"first:1": {"kind": "window", "window": 24}}
    run.recipe["stages"][0]["attention"]["overrides"] = window
    run.recipe["checkpoint"]["keep_last"] = 10
    return shortened(run)


def shortened(run: Run) -> Run:
    """Three steps of each stage."""
    for stage in run.recipe["stages"]:
        stage["tokens"] = 3 * 512
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: Ranks) -> Run:
    """Two ranks that share every sequence. Not to be changed."""
    run = with_options(tmp_path_factory.mktemp("options"), corpora, cp=2)
    ranks.train(run, 2)
    return run


@pytest.mark.parametrize("parallel", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_layouts_train_alike(
    parallel: dict[str, int], finished: Run, tmp_path: Path, corpora: Path, ranks: Ranks
) -> None:
    run = with_options(tmp_path, corpora, **parallel)
    ranks.train(run, 2 if parallel else 1)
    assert run.losses() == pytest.approx(finished.losses(), rel=1e-3)
    norms = [[record["grad_norm"] for record in one.records() if "grad_norm" in record] for one in (run, finished)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_a_run_resumes_bitwise(finished: Run, tmp_path: Path, corpora: Path, ranks: Ranks) -> None:
    run = with_options(tmp_path, corpora, cp=2)
    run.take_over(finished, 4)
    ranks.train(run, 2)
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)


def test_norms_over_the_heads_of_two_ranks_go_on_and_out_as_of_one(tmp_path: Path, corpora: Path, ranks: Ranks) -> None:
    """OLMo 3's layers: two steps on one rank and four on two, exported; compared with six on one."""
    alone, shared = (shortened(Run(tmp_path / name, corpora)) for name in ("alone", "shared"))
    for run in (alone, shared):
        run.folder.mkdir()
        run.recipe["model"] |= {"norms": "post", "qk_norm": "all_heads"}
        run.recipe["attention"] = {"default": "full", "overrides": {0: {"kind": "window", "window": 24}}}
    ranks.train(alone, 1)
    ranks.train(shared, 1, "--stop-at-step", "2")
    shared.recipe["parallel"] = {"tp": 2}
    ranks.train(shared, 2)
    assert shared.losses() == pytest.approx(alone.losses(), rel=1e-4)
    norms = [[record["grad_norm"] for record in run.records()] for run in (shared, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    for run in (alone, shared):
        export_to_hf(open_checkpoint(run.run_dir), run.folder / "out", torch.float32, shard_bytes=1 << 30)
    ours, theirs = (load_file(run.folder / "out" / "model.safetensors") for run in (shared, alone))
    assert "model.layers.1.self_attn.k_norm.weight" in ours
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_the_plan_counts_parameters_and_operations(tmp_path: Path, corpora: Path) -> None:
    config = load_config(with_options(tmp_path, corpora).write_recipe())
    with torch.device("meta"):
        model = build_model(spec_of(config))
    assert plan_of(config, 1).parameters.total == sum(x.numel() for x in model.parameters())
    gate = config.model.hidden_size * config.model.heads
    assert attention_matrices(config.model, 1) - attention_matrices(config.model, 0) == gate
    without = config.model.model_copy(update={"gate_layers": "none"})
    assert matmul_flops(config.model) - matmul_flops(without) == 6 * gate


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_the_plan_counts_what_a_gate_keeps(gate: str, tmp_path: Path, corpora: Path) -> None:
    """Bytes of a gated layer beyond those of the same layer without: what autograd keeps of each."""
    run = with_options(tmp_path, corpora)
    run.recipe["model"] |= {"output_gate": gate}
    run.recipe["stages"][0]["attention"] = {"default": "full"}
    config = load_config(run.write_recipe())
    planned = plan_of(config, 1).stages[0]
    kept = estimate_of(config, planned.stage, planned.mesh).kept_bytes
    tokens = planned.stage.seq_len * planned.stage.micro_batch_size
    model = Transformer(config.model).bfloat16()
    model.set_attention(build_attention(planned.stage.attention, config.model.head_width))
    sizes = []
    for block in model.blocks:
        seen: dict[int, int] = {}

        def note(x: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        x = torch.randn(tokens, config.model.hidden_size, dtype=torch.bfloat16).requires_grad_()
        cos, sin = rope_cos_sin(torch.arange(tokens), config.model.rope, config.model.head_width)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            block(x, cos, sin, packed_layout([tokens]))
        parameters = {x.untyped_storage().data_ptr() for x in block.parameters()}
        sizes.append(sum(size for place, size in seen.items() if place not in parameters))
    assert kept(1, Kept.ALL) - kept(0, Kept.ALL) == sizes[1] - sizes[0] > 0


@pytest.mark.parametrize(
    ("model", "others", "said"),
    [
        ({"sink_layers": "every:3"}, {}, r"model\.sink_layers: 'every:3' asks for 3 layers; the model has 2"),
        ({"gate_layers": [2]}, {}, r"model\.gate_layers: layer ids \[2\] do not exist"),
        ({"rope": {"overrides": {"last:3": {}}}}, {}, r"model\.rope\.overrides: 'last:3' asks for 3 layers"),
        (
            {"rope": {"overrides": {1: {"kind": "yarn", "factor": 2}}}},
            {},
            r"model\.rope\.overrides: layer 1: original_seq_len: missing; kind yarn",
        ),
        ({}, {"attention": {"default": "nsa"}}, r"model\.sink_layers: gives layer 0 a sink, which kind 'nsa'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(
    model: dict[str, Any], others: dict[str, Any], said: str, tmp_path: Path, corpora: Path
) -> None:
    run = with_options(tmp_path, corpora)
    run.recipe["model"] |= model
    run.recipe |= others
    if "attention" in others:
        run.recipe["stages"][0]["attention"] = others["attention"]
    with pytest.raises(ConfigError, match=said):
        check(load_config(run.write_recipe()))


@pytest.mark.parametrize("key", ["theta_", "overrides"])
def test_keys_of_an_override_are_those_of_an_embedding(key: str, tmp_path: Path, corpora: Path) -> None:
    run = with_options(tmp_path, corpora)
    run.recipe["model"]["rope"] = {"overrides": {0: {key: 1}}}
    with pytest.raises(ConfigError, match="overrides"):
        load_config(run.write_recipe())
