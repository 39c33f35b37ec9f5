"""The loss is the sum of token losses / the global number of loss tokens, however the tokens are spread."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full.full_kind import FullKind
from moba_train.config.data import DataConfig, SourceConfig
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig, StageConfig
from moba_train.data.batch import Batch, collate
from moba_train.data.samples import Sample
from moba_train.model.build import initialize_weights
from moba_train.model.loss import LossSums
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import Gradients
from moba_train.parallel.context.engine import context_engine
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients, training_loss
from moba_train.parallel.world import World, joined_world
from moba_train.run.step import StepCounts, StepLosses
from tests.attention.helpers import labelled
from tests.gradients import full_gradient, gradient
from tests.resolved import sharded_of
from tests.run.trainer_ranks import Ranks

VOCAB, SEQ_LEN = 32, 24
MODEL = ModelConfig(vocab_size=VOCAB, hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1)
CONFIG = RunConfig(
    name="test",
    run_dir="unused",
    model=MODEL,
    data=DataConfig(train=[SourceConfig(path="unused")]),
    batch_tokens=4 * SEQ_LEN,
    stages=[StageConfig(name="only", seq_len=SEQ_LEN, tokens=1000)],
)


def samples() -> list[Sample]:
    """Four sequences of two documents: dense loss, loss on one token, and two without any."""
    rng = np.random.default_rng(0)
    weights = np.zeros((4, SEQ_LEN), dtype=np.float32)
    weights[0] = 1
    weights[1, 7] = 1
    made = []
    for weight in weights:
        tokens = rng.integers(VOCAB, size=SEQ_LEN + 1)
        made.append(Sample(tokens[:-1], tokens[1:], weight, [10, SEQ_LEN - 10], []))
    return made


def step(micro_batches: list[Batch], world: World, transport: str | None) -> dict[str, torch.Tensor]:
    """Loss, gradient norm and unsharded gradients of one step, as the trainer forms them; with a `transport`, the ranks
    share every sequence."""
    model = sharded_of(CONFIG, ParallelDims(MeshSizes(dp_shard=world.size), world))
    if transport:
        strategy = CPStrategy(world.size, transport, "zigzag", world.size)
        group = dist.group.WORLD
        assert group is not None
        data_shard = DataShard(engine=context_engine(strategy, group, world.device))
        model.set_engines([data_shard.engine or LOCAL_ENGINE] * MODEL.layers)
        micro_batches = [data_shard.shard_batch(batch) for batch in micro_batches]
    model.set_attention([FullKind(FullKind.Options(), MODEL.head_width)] * MODEL.layers)
    count = torch.tensor(sum(batch.loss_weight_sum for batch in micro_batches))
    dist.all_reduce(count)
    loss = torch.zeros(())
    for batch in micro_batches:
        batch_loss = training_loss(model, batch).total / count
        batch_loss.backward()
        loss += batch_loss.detach()
    dist.all_reduce(loss)
    gradients = {name: full_gradient(parameter) for name, parameter in model.named_parameters()}
    return {"loss": loss, "norm": Gradients(model).norm(), **gradients}


# How four sequences are spread: for each rank, its micro-batches.
SPREADS = {
    "one rank, one pass": [[[0, 1, 2, 3]]],
    "one rank, accumulation, two passes without loss": [[[0], [1], [2], [3]]],
    "a rank without any loss": [[[0, 1]], [[2, 3]]],
    "a rank with one loss token": [[[0], [2]], [[1], [3]]],
}


def worker(spread: list[list[list[int]]], transport: str | None, output: str) -> None:
    with joined_world() as world:
        made = samples()
        batches = [collate([made[i] for i in indices]) for indices in spread[world.rank]]
        result = step(batches, world, transport)
        if world.is_main:
            torch.save(result, output)


def expected() -> dict[str, torch.Tensor]:
    """One step by definition: each sequence alone through the plain model, sums divided by the global count."""
    model = Transformer(MODEL)
    made, total, count = samples(), torch.zeros(()), 0.0
    initialize_weights(model, CONFIG.seed)
    model.set_attention([FullKind(FullKind.Options(backend="reference"), MODEL.head_width)] * MODEL.layers)
    for sample in made:
        batch = collate([sample])
        logits = model(batch.tokens, batch.positions, batch.layout)
        token_losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
        total = total + (token_losses * torch.from_numpy(sample.loss_weight)).sum()
        count += float(sample.loss_weight.sum())
    (total / count).backward()
    gradients = {name: gradient(parameter) for name, parameter in model.named_parameters()}
    norm = torch.stack([found.norm() for found in gradients.values()]).norm()
    return {"loss": (total / count).detach(), "norm": norm, **gradients}


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS.keys())
def test_loss_and_gradients_do_not_depend_on_the_spread(
    spread: list[list[list[int]]], ranks: Ranks, tmp_path: Path
) -> None:
    check(spread, None, ranks, tmp_path / "result.pt")


def check(spread: list[list[list[int]]], transport: str | None, ranks: Ranks, output: Path) -> None:
    ranks.work(worker, (spread, transport, str(output)), len(spread))
    result = torch.load(output, weights_only=True)
    for name, value in expected().items():
        torch.testing.assert_close(result[name], value, rtol=2e-5, atol=1e-7, msg=labelled(name))


@pytest.mark.parametrize("transport", ["ring", "ulysses"])
def test_nor_on_the_ranks_that_share_a_sequence(transport: str, ranks: Ranks, tmp_path: Path) -> None:
    """One of the last three micro-batches has a single loss token, on one of the ranks; the other two have none."""
    check([[[0], [1], [2, 3]]] * 2, transport, ranks, tmp_path / "result.pt")


def test_a_step_without_any_loss_token_leaves_zero_gradients() -> None:
    batch = collate(samples()[2:])
    assert batch.loss_tokens == 0
    model = Transformer(MODEL)
    model.set_attention([FullKind(FullKind.Options(), MODEL.head_width)] * MODEL.layers)
    loss = training_loss(model, batch).total
    loss.backward()
    assert loss.item() == 0
    assert all(not gradient(parameter).any() for parameter in model.parameters())


def test_a_step_counts_weights_and_tokens_of_all_its_micro_batches() -> None:
    made = samples()
    made[0].loss_weight[:] = 0.5
    batches = [replace(collate(made[:1]), padding=3), replace(collate(made[1:]), padding=6)]
    counts = StepCounts.from_rank(batches, stop=True, flops=7.0, readers=2)
    assert counts == StepCounts(SEQ_LEN / 2 + 1, SEQ_LEN + 1, ranks_without_loss=0, stops=1, flops=3.5, padding=4.5)
    assert counts.metrics(8 * SEQ_LEN) == {
        "loss_tokens": SEQ_LEN + 1,
        "loss_token_fraction": (SEQ_LEN + 1) / (8 * SEQ_LEN),
        "ranks_with_zero_loss_tokens": 0,
        "padding_fraction": 4.5 / (8 * SEQ_LEN),
    }
    empty = [collate(made[2:])]
    assert StepCounts.from_rank(empty, False, 7.0).ranks_without_loss == 1
    assert StepCounts.from_rank(empty, False, 7.0, computes_loss=False).ranks_without_loss == 0


def test_auxiliary_losses_of_all_micro_batches_are_added_up() -> None:
    losses = StepLosses(torch.device("cpu"))
    for number in (1.0, 2.0):
        losses.add(LossSums(torch.tensor(number), torch.tensor([0.5, number], requires_grad=True)))
    assert losses.loss.item() == 3
    assert losses.auxiliary is not None
    assert losses.auxiliary.tolist() == [1.0, 3.0]
    assert not losses.auxiliary.requires_grad


def test_gradients_in_bf16_are_not_rounded_once_more_for_the_mean() -> None:
    """The gradient of the output weight is the logits' gradient times the hidden state: rounded as each of both is."""
    sample, weights = samples()[1], 1500  # a power of two would round nothing
    batch = collate([sample])
    model = Transformer(MODEL)
    initialize_weights(model, seed=0)
    model.set_attention([FullKind(FullKind.Options(), MODEL.head_width)] * MODEL.layers)
    model.to(torch.bfloat16)
    for _ in accumulate_gradients(model, [batch], weights):
        pass

    hidden_TD, _ = model.hidden(batch.tokens, batch.positions, batch.layout)
    (token,) = batch.loss_index
    logits_V = model.logits(hidden_TD)[token].double()
    dlogits_V = logits_V.softmax(0) - torch.nn.functional.one_hot(batch.labels[token], VOCAB)
    wanted_VD = torch.outer(dlogits_V / weights, hidden_TD[token].double())
    half_step = torch.finfo(torch.bfloat16).eps / 2
    assert model.output is not None
    torch.testing.assert_close(gradient(model.output.weight).double(), wanted_VD, rtol=2 * half_step, atol=0)
