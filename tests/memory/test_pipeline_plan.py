"""Layers of a pipeline's parts, and what the plan says about its bubble and memory."""

import itertools
import random

import pytest

from moba_train.config.mesh import mesh_sizes
from moba_train.config.parallel import ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.memory.activations import FILLED
from moba_train.memory.moments import RankMoments
from moba_train.memory.pipeline import kept_micro_batches, rank_costs, step_length
from moba_train.parallel.activations import Kept, LayerActivations
from moba_train.parallel.pipeline.model import balanced_split, model_parts, rank_part
from tests.resolved import estimate_of, kept_by, setup_of, stages_of, work_of
from tests.small_recipe import Load

EVERYTHING = [LayerActivations(Kept.ALL)] * 4
"""What the small recipe's layers keep without recomputation."""


def parts_of(config: RunConfig) -> tuple[int, ...]:
    return setup_of(config).parts


def bubble(config: RunConfig, layer: float, output: float) -> float:
    """Idle share of the pipeline with eight micro-batches, by the costs of a layer and of the output projection."""
    parts = parts_of(config)
    ranks = rank_costs(parts, config.parallel.pp, [layer] * config.model.layers, output)
    return 1 - 8 * sum(ranks) / len(ranks) / step_length(config.parallel, len(parts), ranks, 8)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_split_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    layers, parts = rng.randint(4, 9), rng.randint(2, 4)
    costs, output = [rng.choice([1.0, 1.5, 4.0]) for _ in range(layers)], rng.choice([0.0, 2.0])

    def parts_costs(counts: tuple[int, ...]) -> list[float]:
        found = [sum(costs[layer] for layer in part.layers) for part in model_parts(counts)]
        return [*found[:-1], found[-1] + output]

    every = [c for c in itertools.product(range(1, layers + 1), repeat=parts) if sum(c) == layers]
    best = min((max(parts_costs(c)), sum(x**2 for x in parts_costs(c))) for c in every)
    found = parts_costs(balanced_split(costs, output, parts))
    assert (max(found), sum(x**2 for x in found)) == pytest.approx(best)


def test_parts_are_dealt_to_the_ranks_in_turn() -> None:
    parts = model_parts([2, 1, 1, 3])
    assert [part.layers for part in parts] == [(0, 1), (2,), (3,), (4, 5, 6)]
    first, last = (rank_part(parts[rank::2]) for rank in range(2))
    assert (first.layers, first.has_embedding, first.has_output) == ((0, 1, 3), True, False)
    assert (last.layers, last.has_embedding, last.has_output) == ((2, 4, 5, 6), False, True)


def test_the_output_projection_and_full_layers_leave_their_part_fewer_layers(load: Load) -> None:
    even = ("model.layers=8", "model.vocab_size=64", "parallel.pp=2", "attention.overrides={}")
    assert parts_of(load(*even)) == (4, 4)
    large = load(*even, "model.vocab_size=40000")
    first, last = parts_of(large)
    assert first > last
    sparse = "attention={full_layers: 'first:2', moba: {block_size: 64, topk: 2}}"
    stage = "stages=[{name: long, seq_len: 32K, tokens: 1M}]"
    first, last = parts_of(load(*even, sparse, stage))
    assert first < last
    assert parts_of(load(*even, "parallel.pp_schedule=interleaved_1f1b")) == (2, 2, 2, 2)


def test_stages_count_for_the_split_by_their_tokens(load: Load) -> None:
    """Full attention of a short stage at the end makes the first layers dear, but only for a hundredth of the run."""
    base = ("model.layers=8", "model.vocab_size=64", "parallel.pp=2", "attention={moba: {block_size: 64, topk: 2}}")
    end = "{name: end, seq_len: 32K, tokens: 1M, attention: {full_layers: 'first:2'}}"
    first, last = parts_of(load(*base, f"stages=[{end}]"))
    assert first < last
    assert parts_of(load(*base, f"stages=[{{name: begin, seq_len: 2K, tokens: 100M}}, {end}]")) == (4, 4)


def test_the_slower_rank_is_waited_for_by_its_layers_and_output(load: Load) -> None:
    config = load("parallel.pp=2", "parallel.pp_layers=[2, 2]")
    first, last = 2 * 5, 2 * 5 + 7
    assert bubble(config, 5, 7) == pytest.approx(1 - 8 * (first + last) / 2 / (8 * last + first))


def test_a_rank_has_buffers_for_both_neighbours_and_all_micro_batches(load: Load) -> None:
    config = load("parallel.pp=4", "stages.0.micro_batch_size=2")
    stage = stages_of(config)[0]
    sizes = mesh_sizes(stage.parallel, 8)
    count = 32 // (2 * 2)  # sequences of a step; two in a micro-batch, on two data-parallel ranks
    found = [work_of(config, stage, sizes, rank) for rank in range(4)]
    assert [work.received for work in found] == [count, 2 * count, 2 * count, count]
    assert [work.kept for work in found] == [4, 3, 2, 1]


def test_the_bubble_is_that_of_the_schedule_where_parts_are_equal(load: Load) -> None:
    """(pp - 1) / (m + pp - 1) for 1F1B (Narayanan et al. 2021); interleaved parts divide it."""
    base = ("model.layers=8", "model.vocab_size=2", "attention.overrides={}", "parallel.pp=4")
    for schedule, share in (("1f1b", 3), ("interleaved_1f1b", 3 / 2), ("zero_bubble", 1)):
        config = load(*base, f"parallel.pp_schedule={schedule}")
        assert bubble(config, 1, 0) == pytest.approx(share / (8 + share))
    slow = load(*base, "parallel.pp_layers=[1, 1, 1, 5]")
    assert bubble(slow, 1, 0) > 0.5


def test_how_many_micro_batches_a_rank_keeps() -> None:
    one = ParallelConfig(pp=4)
    assert [kept_micro_batches(one, rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert kept_micro_batches(one, 0, 2) == 2
    interleaved = ParallelConfig(pp=4, pp_schedule="interleaved_1f1b")
    assert [kept_micro_batches(interleaved, rank, 8) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_the_first_rank_keeps_more_activations_than_the_last(load: Load) -> None:
    config = load("parallel.pp=4", "model.vocab_size=64", "batch_tokens=8K")
    (stage, _) = stages_of(config)
    memory = estimate_of(config, stage, mesh_sizes(stage.parallel, 4)).by_rank(EVERYTHING)
    kept = [rank.activations for rank in memory]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 1.5 * kept[-1]


def test_budget_fits_the_rank_that_needs_most_and_reckons_all_its_micro_batches(load: Load) -> None:
    """The same rank alone would keep everything: it is what it keeps for other micro-batches that does not fit."""
    config = load("parallel.pp=4", "model.vocab_size=64", "attention.overrides={}", "batch_tokens=8K")
    (stage, _) = stages_of(config)
    sizes = mesh_sizes(stage.parallel, 4)
    estimate = estimate_of(config, stage, sizes)
    recomputed = estimate.reserved([LayerActivations(Kept.INPUT)] * 4)
    everything = [memory.total for memory in estimate.by_rank(EVERYTHING)]
    limit = (recomputed + estimate.reserved(EVERYTHING)) / 2
    assert everything[0] == max(everything) > limit > everything[3]
    found = kept_by(config, stage, sizes, limit / FILLED, None)
    assert recomputed < estimate.reserved(found.layers) <= limit
    assert found.rank_memory == tuple(estimate.by_rank(found.layers))
    assert found.memory == max(found.rank_memory, key=lambda memory: memory.total)
    kept = [layer.kept for layer in found.layers]
    assert kept == sorted(kept), "late layers keep more"
    assert kept[0] < Kept.ALL
    more = [layer if index else LayerActivations(Kept.ALL) for index, layer in enumerate(found.layers)]
    assert estimate.reserved(more) > limit


def test_a_zero_bubble_pipeline_recomputes_nothing(load: Load) -> None:
    config = load("parallel.pp=4", "parallel.pp_schedule=zero_bubble")
    (stage, _) = stages_of(config)
    assert kept_by(config, stage, mesh_sizes(stage.parallel, 4), 1.0, None).keeps_everything


def test_a_zero_bubble_pipeline_keeps_the_gradients_of_the_loss(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan counts the gradients of hidden states and output weight for every micro-batch whose backward pass has not
    reached its second part."""
    config = load("parallel.pp=4", "parallel.pp_schedule=zero_bubble", "model.vocab_size=500000")
    (stage, _) = stages_of(config)
    estimate = estimate_of(config, stage, mesh_sizes(stage.parallel, 4))
    peak = estimate.peak(EVERYTHING).total
    monkeypatch.setattr(RankMoments, "_kept_by_loss", lambda _: 0)
    numbers = (config.model.vocab_size + stage.seq_len * stage.micro_batch_size) * config.model.hidden_size
    assert peak - estimate.peak(EVERYTHING).total == 3 * 2 * numbers
