"""Every kind that can be trained has a layer in one model, and every layer changes its kind with the stage."""

import math
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moba_train.attention.kind import StageContext
from moba_train.attention.registry import KINDS
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from tests.run.tiny_run import Run, assert_same_tensors, checkpoint_tensors, write_corpus

SEQ_LEN = 128
SHRINK = 16
"""Divides all lengths in the kinds' default options, so that they select, look through windows and cross blocks."""
MODEL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2}
STEPS = 3
"""Steps of each of the two stages."""


def small_options(kind: str) -> Section:
    """The kind's defaults with short lengths, and with everything training that an option `train_...` trains."""
    fields = KINDS[kind].Options.model_fields
    lengths = [name for name, field in fields.items() if get_args(Length)[1] in field.metadata]
    options: dict[str, Any] = {name: max(1, fields[name].default // SHRINK) for name in lengths}
    options |= {name: True for name in fields if name.startswith("train_")}
    return KINDS[kind].Options.model_validate(options)


def problems(kind: str, training: bool) -> list[str]:
    context = StageContext(ModelConfig(layers=1, **MODEL), SEQ_LEN, 1, 1, False, "cpu", "here", training)
    return list(KINDS[kind].problems(small_options(kind), context))


TRAINABLE = [kind for kind in KINDS if not problems(kind, training=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_only_training_is_a_reason_to_be_left_out(kind: str) -> None:
    assert problems(kind, training=False) == []


def kind_of(layer: int, stage: int) -> str:
    """Another one in the second stage."""
    return TRAINABLE[(layer + stage) % len(TRAINABLE)]


def mixed(folder: Path, corpora: Path) -> Run:
    """A run of two stages, a layer for each kind."""
    folder.mkdir()
    run = Run(folder, corpora)
    layers = range(len(TRAINABLE))
    run.recipe |= {
        "model": {**MODEL, "layers": len(TRAINABLE)},
        "attention": {kind: small_options(kind).model_dump(mode="json") for kind in TRAINABLE},
        "batch_tokens": SEQ_LEN,
        "micro_batch_size": 1,
        "checkpoint": {"every": 1, "keep_last": 10},
        "stages": [
            {
                "name": name,
                "seq_len": SEQ_LEN,
                "tokens": STEPS * SEQ_LEN,
                "attention": {"overrides": {layer: {"kind": kind_of(layer, stage)} for layer in layers}},
            }
            for stage, name in enumerate(("one", "two"))
        ],
    }
    run.recipe["optim"]["schedule"] = {"warmup_tokens": 0}
    run.use_short_documents()
    del run.recipe["evaluation"]
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    """An undisturbed run. Not to be changed."""
    run = mixed(tmp_path_factory.mktemp("all") / "run", corpora)
    assert run.train_here() == 0
    return run


def own_parameters(tensors: dict[str, Any], layer: int, kind: str) -> dict[str, torch.Tensor]:
    prefix = f"model.blocks.{layer}.attention.{kind}."
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def layers_with_parameters(tensors: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """(layer, the stage that trains it, kind) of every module of a kind's own parameters."""
    for layer in range(len(TRAINABLE)):
        for stage in (0, 1):
            if own_parameters(tensors, layer, kind_of(layer, stage)):
                yield layer, stage, kind_of(layer, stage)


def test_one_model_trains_with_all_of_them(finished: Run) -> None:
    numbers = [(record["loss"], record["grad_norm"]) for record in finished.records()]
    assert len(numbers) == 2 * STEPS
    assert all(0 < number < math.inf for pair in numbers for number in pair)
    described = [record["message"] for record in finished.records("stage")]
    assert all(f"1 x {kind}" in message for message in described for kind in TRAINABLE)
    assert {"full", "moba"} <= set(TRAINABLE)


def test_parameters_change_in_the_stages_that_use_them_alone(finished: Run) -> None:
    between = checkpoint_tensors(finished.run_dir / "checkpoints" / f"step_{STEPS:08d}")
    end = checkpoint_tensors(finished.newest_checkpoint)
    for layer, stage, kind in layers_with_parameters(end):
        before, after = (own_parameters(tensors, layer, kind) for tensors in (between, end))
        changed = any(not torch.equal(after[name], tensor) for name, tensor in before.items())
        assert changed == (stage == 1), (layer, kind)


def test_a_run_resumes_bitwise_inside_the_second_stage(finished: Run, tmp_path: Path, corpora: Path) -> None:
    run = mixed(tmp_path / "stopped", corpora)
    run.take_over(finished, STEPS + 1)
    assert run.train_here() == 0
    assert run.losses() == finished.losses()
    assert_same_tensors(run.newest_checkpoint, finished.newest_checkpoint)


def test_compiled_and_recomputed_blocks_give_the_same_bits(
    finished: Run, tmp_path: Path, corpora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are traced as a whole: in pieces, gradients of a layer's input would be added in another order. What a
    kind keeps with the layout must not make the recomputed block another one than the first. Documents of other lengths
    compile nothing again. A probe sees them all."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # its tracing, without its code
    run = mixed(tmp_path / "compiled", corpora)
    run.recipe |= {"compile": True, "activation_checkpointing": "full"}
    steps = STEPS - 1  # at its end the stage would compile the pass of its validation loss as well
    run.recipe["evaluation"] = {"gate_probe": {"queries": 8, "every": steps}}
    run.recipe["data"]["validation"] = run.recipe["data"]["train"]
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert run.train_here("--stop-at-step", str(steps)) == 0
    (probe,) = run.records("gate_probe")
    for layer, shown in enumerate(probe["gate_probe"]["attention_statistics"]):
        assert shown, kind_of(layer, stage=0)
        assert set(shown) <= set(KINDS[kind_of(layer, stage=0)].statistics)
    assert [reason for reason in counters["graph_break"] if "KdaKind.mix" not in reason] == []
    assert counters["stats"]["unique_graphs"] <= len(TRAINABLE)
    assert run.losses() == finished.losses()[:steps]


@pytest.mark.gpu
@pytest.mark.timeout(2800)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_share_the_sequences_of_all_of_them(tmp_path: Path, corpora: Path) -> None:
    """NCCL, bf16, head width 64 and the kinds' own defaults, so that the kernels of real training run. Documents are
    longer and shorter than a GPU's share, and longer than what InfLLM-v2 attends to densely. On a new machine the first
    run waits more than four minutes for fla-core's kernels of `kda` alone, which are tuned once."""
    run = mixed(tmp_path / "run", corpora)
    write_corpus(tmp_path / "long", 12, 0, lengths=(3_000, 16_000))
    run.recipe["data"] = {"train": [{"path": str(tmp_path / "long")}]}
    run.recipe["model"] |= {"hidden_size": 256}
    run.recipe["attention"] = {}
    run.recipe["optim"]["lr"] = 1e-4  # with a larger one, steps carry on what a choice of blocks has changed
    run.recipe["batch_tokens"] = 2**14
    for stage in run.recipe["stages"]:
        stage |= {"seq_len": 2**14, "tokens": STEPS * 2**14}
    curves: list[dict[str, list[float]]] = []
    for parallel in ({}, {"cp": 2}, {"cp": 2}):
        shutil.rmtree(run.run_dir, ignore_errors=True)
        run.recipe["parallel"] = parallel
        code, output = run.train_on_gpu(parallel.get("cp", 1), seconds=900)
        assert code == 0, output
        keys = ("loss", "grad_norm", "loss_tokens")
        curves.append({key: [record[key] for record in run.records()] for key in keys})
    alone, shared, again = curves
    for run_of_two in (shared, again):
        assert run_of_two["loss"] == pytest.approx(alone["loss"], rel=2e-3)
        assert run_of_two["grad_norm"] == pytest.approx(alone["grad_norm"], rel=5e-2)
        assert run_of_two["loss_tokens"] == alone["loss_tokens"]
