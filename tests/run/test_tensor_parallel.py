"""Tensor parallelism changes where the parts of a layer live, not what is computed: the same loss, gradients, choice of
blocks and weights as the plain model's on one device."""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.layout import Layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention
from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.data.batch import Batch, collate
from moba_train.data.samples import Sample
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Engine, Transformer
from moba_train.optim.gradients import Gradients
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.data_shard import DataShard, shard_batch
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import joined_world
from tests.attention.helpers import labelled
from tests.forked import run_processes
from tests.gradients import gradient
from tests.resolved import sharded_of
from tests.run.trainer_ranks import Ranks, free_port

VOCAB, SEQ_LEN = 36, 48
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "norms on both sides, sinks, gates": {
        "norms": "both",
        "centered_norms": True,
        "embedding_scale": 3.0,
        "sink_layers": "all",
        "o_bias": True,
        "gate_layers": "last:1",
    },
    "norms behind, gates of heads": {"norms": "post", "gate_layers": "all", "output_gate": "head"},
    "centered norms over all heads": {"centered_norms": True, "qk_norm": "all_heads", "qkv_bias": True},
    "llama, one layer, compiled": {"compile": True},
    "norms over all heads, one layer, compiled": {"compile": True, "norms": "post", "qk_norm": "all_heads"},
}
Step = dict[str, Tensor]


def recipe(compile: bool = False, **options: Any) -> RunConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 28,
        "layers": 1 if compile else 2,
        "heads": 4,
        "kv_heads": 2,
    }
    return RunConfig(
        name="test",
        run_dir="unused",
        model=ModelConfig(**sizes, head_dim=16, **options),
        data=DataConfig(train=[SourceConfig(path="unused")]),
        batch_tokens=SEQ_LEN,
        stages=[StageConfig(name="only", seq_len=SEQ_LEN, tokens=1000)],
        compile=compile,
    )


def batches() -> list[Batch]:
    """Sequences of two documents, with loss on some tokens; in the second on none of the last two thirds, in the third
    on none at all."""
    rng, made = np.random.default_rng(0), []
    for weight in (rng.random(SEQ_LEN) < 0.5, np.arange(SEQ_LEN) < SEQ_LEN // 3, np.zeros(SEQ_LEN)):
        tokens = rng.integers(VOCAB, size=SEQ_LEN + 1)
        made.append(Sample(tokens[:-1], tokens[1:], weight.astype(np.float32), [30, SEQ_LEN - 30], []))
    return [collate([sample]) for sample in made]


def step(model: Transformer, data_shard: DataShard, device: torch.device) -> tuple[Step, list[Tensor]]:
    """This rank's part of a step's loss, with the gradients in place; and the blocks selected for its heads."""
    selected: list[Tensor] = []

    class Recording(OperatorEngine):
        def __call__(
            self, q: Tensor, k: Tensor, v: Tensor, attention: LocalAttention, layout: Layout, *sink: Any
        ) -> tuple[Tensor, Tensor]:
            if isinstance(attention, MobaAttention):
                summaries = attention.summarize(k.detach(), layout)
                selected.append(attention.select(q.detach(), summaries, layout)[0].cpu())
            return super().__call__(q, k, v, attention, layout, *sink)

    engines: list[Engine] = [Recording()] * len(model.blocks)
    width = model.config.head_width
    # In bf16 near-ties are chosen by rounding, which changes gradients by up to 7 %: there every block is selected.
    topk = 2 if device.type == "cpu" else SEQ_LEN // 4
    kinds = [
        FullKind(FullKind.Options(backend="reference"), width),
        MobaKind(MobaKind.Options(block_size=4, topk=topk, backend="reference"), width),
    ]
    model.set_attention(kinds[: len(model.blocks)])
    model.set_engines(engines)
    made, loss = batches(), torch.zeros((), device=device)
    count = sum(batch.loss_weight_sum for batch in made)
    for batch in made:
        own = data_shard.shard_batch(batch).to(device)
        batch_loss = training_loss(model, own).total / count
        batch_loss.backward()
        loss += batch_loss.detach()
    return {"loss": loss}, selected


def on_one_device(options: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """The plain model's step, and the weights it began with."""
    config = recipe(**options)
    model = Transformer(config.model).to(device)
    initialize_weights(model, config.seed)
    weights = {f"weight {name}": parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    result, selected = step(model.to(dtype), DataShard(), device)
    for name, parameter in model.named_parameters():
        result[f"gradient {name}"] = gradient(parameter)
    norms = zip(("norm of full", "norm of moba"), (Gradients(block).norm() for block in model.blocks), strict=False)
    result |= {"norm": Gradients(model).norm(), **dict(norms)}
    return weights | result | {f"selected {number}": ids for number, ids in enumerate(selected)}


def worker(options: list[dict[str, Any]], output: str) -> None:
    """All models' steps on the ranks of this world, which are one tp group."""
    torch.compiler.reset()  # runs before in this process have compiled for other lengths
    without_code_generation = partial(torch.compile, backend="aot_eager")  # which takes long on the CPU
    with joined_world() as world, patch.object(torch, "compile", without_code_generation):
        dims = ParallelDims(MeshSizes(tp=world.size), world)
        data_shard = DataShard(tp_rank=world.rank, tp_size=world.size)
        results = []
        for model_options in options:
            model = sharded_of(recipe(**model_options), dims)
            weights = {f"weight {name}": gathered(parameter) for name, parameter in model.named_parameters()}
            result, selected = step(model, data_shard, world.device)
            dist.all_reduce(result["loss"])
            by_kind = Gradients(model).norms_by_kind(["full", "moba"][: len(model.blocks)])
            result |= {"norm": Gradients(model).norm()}
            result |= {key.replace("grad_norm_", "norm of "): norm for key, norm in by_kind.items()}
            result |= {f"gradient {name}": gathered(parameter.grad) for name, parameter in model.named_parameters()}
            of_ranks: list[Any] = [None] * world.size
            dist.all_gather_object(of_ranks, selected)
            result |= {f"selected {number}": torch.cat(ids) for number, ids in enumerate(zip(*of_ranks, strict=True))}
            results.append({name: value.cpu() for name, value in (weights | result).items()})
        if world.is_main:
            torch.save(results, output)


def gathered(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach().clone()


@pytest.fixture(scope="module")
def on_two_ranks(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Step]:
    output = tmp_path_factory.mktemp("tensor") / "results.pt"
    ranks.work(worker, (list(MODELS.values()), str(output)), 2)
    return dict(zip(MODELS, torch.load(output, weights_only=True), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_compute_what_one_device_does(name: str, on_two_ranks: dict[str, Step]) -> None:
    """One of the ranks has a micro-batch without loss tokens, and both have one."""
    got, want = on_two_ranks[name], on_one_device(MODELS[name], torch.device("cpu"))
    assert got.keys() == want.keys()
    assert ("gradient blocks.0.attention.q_norm.weight" in got) == ("qk_norm" in MODELS[name])
    assert ("gradient blocks.0.attention.q_proj.bias" in got) == ("qkv_bias" in MODELS[name])
    assert ("selected 0" in got) == ("one layer" not in name), "the second layer has MoBA"
    for key, value in want.items():
        exact = key.startswith(("weight", "selected"))
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-7}
        torch.testing.assert_close(got[key], value, **tolerance, msg=labelled(key))


def gpu_rank(rank: int, port: int, output: str) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)} | {k: str(v) for k, v in places.items()}
    worker(list(MODELS.values()), output)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_are_as_exact_as_one(tmp_path: Path) -> None:
    """NCCL, bf16: gradients are as far from those in float32 as one GPU's, which rounds partial sums once less."""
    run_processes(gpu_rank, (free_port(), str(tmp_path / "results.pt")), 2, "cuda")
    device = torch.device("cuda")
    for options, got in zip(MODELS.values(), torch.load(tmp_path / "results.pt", weights_only=True), strict=True):
        truth, one = (on_one_device(options, device, dtype) for dtype in (torch.float32, torch.bfloat16))
        for key, right in truth.items():
            if key.startswith("weight"):
                assert torch.equal(got[key], right.cpu()), key
            elif not key.startswith("selected"):
                scale = (right.norm() + truth["norm"] / 100).cpu()  # gradients of key biases are next to nothing
                errors = [((x.cpu() - right.cpu()).norm() / scale).item() for x in (got[key], one[key])]
                assert errors[0] <= 2 * errors[1] + 0.02, f"{key}: errors {errors[0]:.1e}, one GPU {errors[1]:.1e}"


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("cp", [1, 2])
def test_ranks_that_share_rows_have_every_loss_token_once_with_its_label(cp: int, tp: int) -> None:
    """Among them one without any; tokens, positions and documents stay those of all rows."""
    batch = batches()[1]
    sequence = SequenceLayout.split(SEQ_LEN, cp, "zigzag")
    found: list[Any] = []
    for cp_rank in range(cp):
        shard = shard_batch(batch, sequence, cp_rank)
        parts = [DataShard(tp_rank=rank, tp_size=tp).shard_batch(shard) for rank in range(tp)]
        assert sum(part.loss_weight_sum for part in parts) == shard.loss_weight_sum
        for rank, part in enumerate(parts):
            labels, rows, weights = part.loss_on
            assert part.tokens is shard.tokens
            assert part.layout is batch.layout
            assert len(rows) >= 1
            assert 0 <= rows.min() <= rows.max() < sequence.rows // tp
            tokens = shard.tokens[rows + rank * sequence.rows // tp]
            kept = weights > 0
            found += zip(tokens[kept].tolist(), labels[kept].tolist(), strict=True)
        assert any(part.loss_tokens == 0 for part in parts)
    want = batch.loss_index
    assert sorted(found) == sorted(zip(batch.tokens[want].tolist(), batch.labels[want].tolist(), strict=True))
