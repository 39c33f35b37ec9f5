"""Every registered kind shows what it says that it shows, on one device and on ranks, and only to an observer."""

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.observer import StatisticsObserver, observing
from moba_train.attention.registry import KINDS
from moba_train.attention.statistics import Statistics, joined
from moba_train.config.base import Length
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import Layer, make_layer, run_layer
from tests.thread_ranks import thread_transports

LENGTHS = [60, 3, 37]
OPTIONS: dict[str, dict[str, Any]] = {
    "infllm_v2": {"topk": 4, "local_blocks": 2, "dense_len": 20},
    "nsa": {"topk": 5, "window": 8},
    "infllm": {"topk": 2, "window": 12, "representatives": 2},
    "moa": {"alpha": [8, 16, 16, 128], "max_length": 64, "sink_tokens": 4},
    "seer": {"topk": 3},
    "msa": {"topk": 3},
    "qsa": {"topk": 3},
    "indexer": {"topk": 3, "local_blocks": 1},
}
"""Besides lengths, of which those that are not here become a sixteenth of the default, and at most 4."""


def small_layer(name: str, lengths: list[int], **changes: Any) -> Layer:
    fields = KINDS[name].Options.model_fields
    short = {
        key: min(4, -(-field.default // 16)) for key, field in fields.items() if get_args(Length)[1] in field.metadata
    }
    return make_layer(name, short | OPTIONS.get(name, {}) | changes, lengths)


@torch.no_grad()
def seen(layer: Layer) -> dict[str, float]:
    """What an observer sees on one device."""
    engine = OperatorEngine()
    with observing(engine, StatisticsObserver()) as watched:
        run_layer(layer, engine)
    return watched.statistics.values


def seen_by_ranks(layer: Layer, strategy: CPStrategy) -> list[Statistics]:
    """What the observers of ranks see that share the sequence."""
    transports, _ = thread_transports(strategy)
    engines = [ContextParallel(strategy, transport) for transport in transports]
    sequence = engines[0].sequence(layer.layout.total)

    @torch.no_grad()
    def rank(engine: ContextParallel) -> Statistics:
        own = layer.with_inputs(sequence.shard(x, engine.rank) for x in layer.inputs())
        with observing(engine, StatisticsObserver()) as watched:
            run_layer(own, engine, sequence.shard(layer.positions, engine.rank))
        return watched.statistics

    with ThreadPoolExecutor(strategy.ranks) as pool:
        return list(pool.map(rank, engines))


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_shows_what_it_says(name: str) -> None:
    found = seen(small_layer(name, LENGTHS))
    assert KINDS[name].statistics, f"kind {name!r} shows nothing: see AttentionKind.statistics"
    assert set(found) == set(KINDS[name].statistics)
    assert all(map(math.isfinite, found.values())), found


@pytest.mark.parametrize("name", KINDS)
def test_ranks_together_see_what_one_device_sees(name: str) -> None:
    """But for the spread of blocks, which a rank has for its own queries, and for states, of which it has those behind
    its own tokens."""
    apart = {"load_imbalance", "entropy", "state_norm", "max_state_norm"}
    layer = small_layer(name, LENGTHS)
    strategy = CPStrategy(2, "allgather", "zigzag", 2)
    found = joined(seen_by_ranks(layer, strategy)).values
    want = seen(layer)
    assert set(found) == set(want)
    assert {key: found[key] for key in found if key not in apart} == pytest.approx(
        {key: want[key] for key in found if key not in apart}
    )


@pytest.mark.parametrize("name", KINDS)
def test_nobody_pays_for_what_nobody_looks_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("computed without an observer")

    monkeypatch.setattr(Statistics, "__init__", refuse)
    with torch.no_grad():
        run_layer(small_layer(name, LENGTHS))


def test_means_are_weighted_extremes_are_not_and_what_is_no_number_stays() -> None:
    parts = [Statistics({"mean": 1.0, "max_x": 3.0, "min_x": 3.0}, 1), Statistics({"mean": 5.0, "max_x": 2.0}, 3)]
    assert joined(parts).values == {"mean": 4.0, "max_x": 3.0, "min_x": 3.0}
    broken = joined([*parts, Statistics({"mean": math.nan, "max_x": math.nan}), *parts]).values
    assert all(map(math.isnan, (broken["mean"], broken["max_x"])))


def test_the_guide_explains_every_number() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    told = set(re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE))
    assert {number for kind in KINDS.values() for number in kind.statistics} <= told
    rows = re.findall(r"^\| `(\w+)` \| (all but )?((?:`\w+`(?:, )?)+) \|", guide, re.MULTILINE)
    for number, all_but, kinds in rows:
        show = {name for name, kind in KINDS.items() if number in kind.statistics}
        named = set(re.findall(r"\w+", kinds)) & set(KINDS)
        assert (set(KINDS) - show if all_but else show) == named, number
    assert len(rows) > 10
