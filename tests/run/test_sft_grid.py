"""Conversations with sparse loss masks: the same loss and gradients on any grid of dp, cp, accumulation and packing."""

import itertools
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.layout import packed_layout
from moba_train.config.mesh import mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.data.indexed import IndexedDataset
from moba_train.data.loader import step_batches
from moba_train.data.loss_mask import LossNorm, mask_prefix
from moba_train.data.samples import StageData
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import Gradients
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import World, joined_world, sum_over_ranks
from tests.attention.helpers import labelled
from tests.gradients import full_gradient, gradient
from tests.resolved import shard_of, sharded_of, stages_of
from tests.run.trainer_ranks import Ranks

VOCAB = 32
LENGTHS = [17, 28, 21, 4, 22, 12, 9, 15, 29, 31, 6, 19, 25, 10]
"""They fill 8 samples of 32 tokens, or 4 of 64, with some padding."""
LOSS_AT = {0: [3], 1: [0], 4: [5, 6, 7, 8, 21], 7: [14], 9: [1, 2, 30], 12: [24]}
"""The tokens with loss, by document. The first token of a document cannot be predicted, so document 1 has none."""
GRID = [
    {"cp": 1, "seq_len": 32, "micro": 1},
    {"cp": 1, "seq_len": 32, "micro": 2},
    {"cp": 1, "seq_len": 64, "micro": 1},
    {"cp": 2, "seq_len": 64, "micro": 2},
    {"cp": 2, "seq_len": 32, "micro": 1},
    {"cp": 4, "seq_len": 32, "micro": 4},
]
"""On four ranks: dp is 4 / cp, the rest is accumulated."""
NORMS: list[LossNorm] = ["token", "sequence"]


def write_conversations(prefix: str) -> None:
    rng = np.random.default_rng(0)
    with (
        IndexedDatasetWriter(prefix, np.uint16) as corpus,
        IndexedDatasetWriter(mask_prefix(prefix), np.uint8) as masks,
    ):
        for document, length in enumerate(LENGTHS):
            corpus.add_document(rng.integers(VOCAB, size=length))
            masks.add_document(np.isin(np.arange(length), LOSS_AT.get(document, [])))


def config_of(case: dict[str, int]) -> RunConfig:
    tokens = -(-sum(LENGTHS) // case["seq_len"]) * case["seq_len"]
    return RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": "unused",
            "model": {
                "vocab_size": VOCAB,
                "hidden_size": 16,
                "intermediate_size": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 4,
            },
            "attention": {"full_layers": "last:1", "moba": {"block_size": 8, "topk": 2}},
            "data": {"train": [{"path": "unused"}], "packing": "best_fit"},
            "batch_tokens": tokens,
            "micro_batch_size": case["micro"],
            "parallel": {"cp": case["cp"], "cp_transport": "ring"} if case["cp"] > 1 else {},
            "stages": [{"name": "only", "seq_len": case["seq_len"], "tokens": tokens}],
        }
    )


def one_step(case: dict[str, int], norm: LossNorm, prefix: str, world: World) -> dict[str, Any]:
    """One optimizer step's loss and gradients, from the files on, as the trainer forms them."""
    config = config_of(case)
    (stage,) = stages_of(config)
    sizes = mesh_sizes(stage.parallel, world.size)
    dims = ParallelDims(sizes, world)
    model = sharded_of(config, dims)
    model.set_attention(build_attention(stage.attention, config.model.head_width))
    data_shard = shard_of(config, stage, dims)
    if data_shard.engine:
        model.set_engines([data_shard.engine] * 2)
    sources = [config.data.train[0].model_copy(update={"path": prefix})]
    data = StageData(sources, stage.seq_len, stage.batch_sequences, 0, {}, VOCAB, "best_fit", norm)
    loaded = step_batches(
        data, 0, stage.batch_sequences, stage.micro_batch_size, data_shard.dp_rank, data_shard.dp_size
    )
    batches = [data_shard.shard_batch(batch) for batch in loaded]
    here = sum(batch.loss_tokens for batch in batches)
    weight, tokens, without = sum_over_ranks([sum(b.loss_weight_sum for b in batches), here, here == 0])
    loss = torch.zeros(())
    for batch in batches:
        batch_loss = training_loss(model, batch).total / weight
        batch_loss.backward()
        loss += batch_loss.detach()
    dist.all_reduce(loss)
    kinds = [layer.kind for layer in stage.attention]
    gradients = {name: full_gradient(parameter) for name, parameter in model.named_parameters()}
    return {
        "loss": loss,
        "tokens": tokens,
        "without": without,
        "norms": Gradients(model).norms_by_kind(kinds),
        **gradients,
    }


def all_steps(prefix: str, output: str) -> None:
    """What a rank does."""
    with joined_world(timedelta(seconds=60)) as world:
        found = [one_step(case, norm, prefix, world) for case, norm in itertools.product(GRID, NORMS)]
        if world.is_main:
            torch.save(found, output)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    name = str(tmp_path_factory.mktemp("sft") / "conversations")
    write_conversations(name)
    return name


@pytest.fixture(scope="module")
def results(prefix: str, ranks: Ranks) -> dict[tuple[int, LossNorm], dict[str, Any]]:
    """Results of every case, by its number and norm."""
    ranks.work(all_steps, (prefix, f"{prefix}.pt"), 4)
    found = torch.load(f"{prefix}.pt", weights_only=True)
    return dict(zip(itertools.product(range(len(GRID)), NORMS), found, strict=True))


@pytest.fixture(scope="module")
def expected(prefix: str) -> dict[LossNorm, dict[str, torch.Tensor]]:
    """By definition: each conversation alone through the model, its token losses averaged over all, or first in it."""
    config = config_of(GRID[0])
    (stage,) = stages_of(config)
    corpus, found = IndexedDataset(prefix), {}
    for norm in NORMS:
        model = Transformer(config.model)
        initialize_weights(model, config.seed)
        model.set_attention(build_attention(stage.attention, config.model.head_width))
        losses = []
        for document, places in LOSS_AT.items():
            tokens = torch.from_numpy(corpus.document(document).astype(np.int64))
            logits = model(tokens, torch.arange(len(tokens)), packed_layout([len(tokens)]))
            rows = torch.tensor([place for place in places if place > 0], dtype=torch.int64)
            if len(rows):
                losses.append(torch.nn.functional.cross_entropy(logits[rows - 1], tokens[rows], reduction="none"))
        loss = torch.cat(losses).mean() if norm == "token" else torch.stack([each.mean() for each in losses]).mean()
        loss.backward()
        gradients = {name: gradient(parameter) for name, parameter in model.named_parameters()}
        norms = [
            torch.stack([gradient(parameter).norm() for parameter in block.parameters()]).norm()
            for block in model.blocks
        ]
        found[norm] = {"loss": loss.detach(), "moba": norms[0], "full": norms[1], **gradients}
    return found


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("number", range(len(GRID)), ids=lambda n: "-".join(f"{k}{v}" for k, v in GRID[n].items()))
def test_loss_and_gradients_are_those_of_the_definition(
    number: int, norm: LossNorm, results: dict[tuple[int, LossNorm], Any], expected: dict[LossNorm, Any]
) -> None:
    got, want = results[number, norm], dict(expected[norm])
    assert got["tokens"] == sum(place > 0 for places in LOSS_AT.values() for place in places)
    for kind in ("moba", "full"):
        torch.testing.assert_close(got["norms"][f"grad_norm_{kind}"], want.pop(kind), rtol=1e-4, atol=1e-7)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=labelled(name))


def test_the_two_norms_differ_and_some_ranks_had_no_loss_token(results: dict[tuple[int, LossNorm], Any]) -> None:
    by_token, by_sequence = (results[0, norm]["loss"].item() for norm in NORMS)
    assert by_token != pytest.approx(by_sequence, rel=1e-3)
    assert max(result["without"] for result in results.values()) >= 1
