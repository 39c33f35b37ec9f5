"""Layouts in which other trainers were reported to compute another loss, gradient or norm than one device."""

import dataclasses
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.data.batch import Batch, collate
from moba_train.model import loss
from moba_train.parallel.forward import token_losses
from moba_train.parallel.world import World, joined_world
from moba_train.run.learner import Learner
from moba_train.run.step import StepCounts
from tests.conformance.layouts import LR, SIZES, Case, StageSamples, add_noise, resolved, samples
from tests.conformance.running import problems_of
from tests.run.trainer_ranks import Ranks

FULL: tuple[str, dict[str, Any]] = ("full", {})
MOBA: tuple[str, dict[str, Any]] = ("moba", {"block_size": 4, "topk": 3})


def layout(**parallel: Any) -> dict[str, Any]:
    """The section `parallel` with these keys."""
    return dict.fromkeys(SIZES, 1) | parallel


def case(parallel: dict[str, Any], **others: Any) -> Case:
    """A model with a layer of full attention and one of MoBA on this layout."""
    return Case(seed=1, parallel=parallel, attention=[FULL, MOBA], **others)


CASES: dict[str, Case] = {
    "cp 2, packed, full attention between nodes": case(layout(cp=2, cp_transport="ring"), documents="many"),
    "cp 4, packed, odd lengths": case(layout(cp=4, cp_transport="allgather"), documents="many", seq_len=61),
    "cp 4, one loss token": case(layout(cp=4), documents="few", mask="one token", sequences=2),
    "pp 2, accumulation": case(layout(pp=2, pp_schedule="1f1b"), sequences=8, micro_batch_size=2),
    "dp 2, accumulation, uneven masks": case(layout(dp_shard=2), sequences=8, mask="sparse"),
    "dp 2 x cp 2, uneven masks": case(layout(dp_replicate=2, cp=2), sequences=8, mask="sparse"),
    "cp of all ranks, Ulysses": case(layout(cp=2, cp_transport="ulysses"), seq_len=64),
    "cp 2, norm": case(layout(cp=2, cp_transport="ring", cp_layout="zigzag"), mask="sparse", clip_norm=0.05),
    "tp 2": case(layout(tp=2), mask="sparse"),
}


@pytest.fixture(scope="module")
def problems(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What differs in each of the cases from one device."""
    found = problems_of([*CASES.values()], ranks, tmp_path_factory.mktemp("layouts"))
    return dict(zip(CASES, found, strict=True))


def test_packed_documents_stay_apart_on_ranks_that_share_a_sequence(problems: dict[str, list[str]]) -> None:
    """Megatron-LM#6156, Megatron-Bridge#1292: with context parallelism there is no document mask, or no packing."""
    for name in ("cp 2, packed, full attention between nodes", "cp 4, packed, odd lengths"):
        assert problems[name] == []


def test_ranks_without_any_loss_token_of_a_split_document_find_no_nan(problems: dict[str, list[str]]) -> None:
    """Automodel#737: NaN where a document is divided and all of a rank's part is masked."""
    assert problems["cp 4, one loss token"] == []


def test_accumulation_in_a_pipeline_scales_no_gradient(problems: dict[str, list[str]]) -> None:
    """torchtitan#1733: gradients are divided by the number of micro-batches, twice with a pipeline."""
    assert problems["pp 2, accumulation"] == []


def test_uneven_masks_give_the_mean_over_tokens_and_not_of_means(problems: dict[str, list[str]]) -> None:
    """torchtitan#1842: the mean of the ranks' means."""
    for name in ("dp 2, accumulation, uneven masks", "dp 2 x cp 2, uneven masks"):
        assert problems[name] == []


def test_gradients_are_reduced_where_all_ranks_share_the_sequence(problems: dict[str, list[str]]) -> None:
    """VeOmni#1059: with one data-parallel rank and Ulysses, the reduction of gradients does nothing."""
    assert problems["cp of all ranks, Ulysses"] == []


def test_the_gradient_norm_does_not_grow_with_the_ranks_of_a_sequence(problems: dict[str, list[str]]) -> None:
    """verl#6609: with the loss per token, the norm explodes at cp 2; here also that of each attention kind."""
    assert problems["cp 2, norm"] == []


def test_a_loss_in_chunks_has_the_gradients_of_the_whole_under_tensor_parallelism(
    problems: dict[str, list[str]], curves: dict[str, list[list[float]]]
) -> None:
    """torchtitan PR#3412: the gradient of the output weight has the wrong placement. One step exactly; and many with a
    chunk of seven tokens, so that each rank has several."""
    assert problems["tp 2"] == []
    assert_same_curves(curves["tp 2"], curves["alone"])


@pytest.mark.parametrize("name", ["cp 2", "cp 4"])
def test_context_parallelism_does_not_change_losses_step_by_step(
    name: str, curves: dict[str, list[list[float]]]
) -> None:
    """Automodel#587: losses with context parallelism are others from the first step on."""
    assert_same_curves(curves[name], curves["alone"])


STEPS = 500 if "MOBA_LAYOUTS" in os.environ else 5
CURVES = {"alone": layout(), "tp 2": layout(tp=2), "cp 2": layout(cp=2), "cp 4": layout(cp=4)}


@pytest.fixture(scope="module")
def curves(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """[loss, gradient norm] of every step on each of the layouts."""
    output = tmp_path_factory.mktemp("curves") / "curve.pt"
    found = {}
    for name, parallel in CURVES.items():
        trained = case(parallel, documents="few", mask="sparse", clip_norm=0.5)
        ranks.work(train, (trained.line(), STEPS, str(output)), trained.ranks)
        found[name] = torch.load(output)
    return found


def train(line: str, steps: int, output: str) -> None:
    """Some steps of a case, each on sequences of its own, with chunks of seven tokens."""
    with in_float64(line) as (world, learner, trained), patch.object(loss, "chunk_tokens", lambda _: 7):
        (stage,) = resolved(trained).stages
        shard = learner.data_shard
        curve = []
        for step in range(steps):
            made = samples(dataclasses.replace(trained, seed=step))
            batches = shard.batches(StageSamples(made), stage, 0)
            own = StepCounts.from_rank(batches, False, 0.0, world.size // shard.dp_size, shard.computes_loss)
            weight = own.summed_over_ranks().loss_weight
            result = learner.measure(learner.accumulate(batches, weight, step), weight, (), step)
            curve.append([result.numbers["loss"], result.numbers["grad_norm"]])
            learner.update(LR / 10, result.numbers["grad_norm"])
            learner.discard_gradients()
        if world.is_main:
            torch.save(curve, output)


class in_float64:
    """Around the work of the ranks on one case: world, learner and the case, float64 by default."""

    def __init__(self, line: str) -> None:
        self.case = Case.from_line(line)

    def __enter__(self) -> tuple[World, Learner, Case]:
        torch.set_default_dtype(torch.float64)
        self.world = joined_world()
        world = self.world.__enter__()
        run = resolved(self.case)
        learner = Learner(run, world)
        add_noise(learner.model, self.case.seed)
        learner.enter(run.stages[0], run.layouts[0])
        return world, learner, self.case

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)
        self.world.__exit__(*error)


def assert_same_curves(got: list[list[float]], want: list[list[float]]) -> None:
    """Equal up to the rounding of token weights, which are float32, and what training makes of it."""
    assert len(got) == len(want) == STEPS
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


PERTURBED = {
    "pp 4": layout(pp=4, pp_schedule="1f1b"),
    "cp 4": layout(cp=4, cp_transport="ring"),
    "pp 2 x cp 2": layout(pp=2, pp_schedule="1f1b", cp=2),
}


@pytest.mark.parametrize("name", PERTURBED)
def test_a_changed_token_changes_its_own_document_alone(name: str, ranks: Ranks, tmp_path: Path) -> None:
    """Megatron-Bridge#2952: packed documents see each other in a pipeline of more than two ranks."""
    pipeline = Case(seed=1, parallel=PERTURBED[name], attention=[FULL, MOBA, MOBA, FULL], seq_len=64)
    ranks.work(perturb, (pipeline.line(), str(tmp_path / "losses.pt")), 4)
    before, after = torch.load(tmp_path / "losses.pt")
    changed = (before != after).nonzero().flatten().tolist()
    assert changed == list(range(29, 50)), "from the changed token, and its prediction, to the end of its document"


def perturb(line: str, output: str) -> None:
    """The loss of every token of three packed documents, as they are and with token 30 changed."""
    with in_float64(line) as (world, learner, trained):
        sample = dataclasses.replace(samples(trained)[0], lengths=[20, 30, 14])
        found = []
        for change in (0, 1):
            tokens = sample.tokens.copy()
            labels = sample.labels.copy()
            tokens[30] = labels[29] = (tokens[30] + change) % 36
            batch = collate([dataclasses.replace(sample, tokens=tokens, labels=labels)])
            found.append(of_all_tokens(learner, batch, world))
        if world.is_main:
            torch.save(found, output)


def of_all_tokens(learner: Learner, batch: Batch, world: World) -> Tensor:
    """The loss of every token, [T], added up over the ranks."""
    shard = learner.data_shard
    own = shard.shard_batch(batch)
    tokens_T = torch.arange(batch.layout.total)
    if shard.engine is not None:
        tokens_T = shard.engine.sequence(batch.layout.total).shard(tokens_T, shard.engine.rank)
    losses_n = token_losses(learner.model, own)
    found_T = torch.zeros(batch.layout.total)
    if shard.computes_loss:
        found_T[tokens_T[own.loss_index]] = losses_n.double()
    dist.all_reduce(found_T)
    return found_T
