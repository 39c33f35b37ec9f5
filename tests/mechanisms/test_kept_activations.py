"""Layers of mechanisms give the same bits, whatever they keep for the backward pass."""

from collections import Counter
from functools import partial

import pytest
import torch

from moba_train.parallel.activations import Kept, LayerActivations, set_activations
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from tests.parallel.test_activations import (
    CPU,
    assert_policies_give_the_same_bits,
    assert_same_bits,
    calls,
    model_of,
    step,
)
from tests.thread_ranks import thread_transports

__all__ = ["calls"]


def test_a_rank_of_several_traces_its_layers_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that gather keys or states, on the first of two ranks whose other one would send the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(AllGather, "gather", lambda _transport, x: torch.cat([x, x]))
    monkeypatch.setattr(AllGather, "sum_shards", lambda _transport, x: sum(x.chunk(2)))
    names = ("lightning", "nsa")
    torch._dynamo.reset()  # sizes that earlier tests have made symbols take several times as long
    strategy = CPStrategy(2, "allgather", "zigzag", 2)
    engine = ContextParallel(strategy, thread_transports(strategy)[0][0])
    found = []
    for compiled, kept in ((False, Kept.ALL), (True, Kept.ATTENTION)):
        model = model_of(*names, compiled=compiled)
        model.set_engines([engine] * len(names))
        set_activations(model, [LayerActivations(kept)] * len(names), CPU)
        graph_breaks = torch._dynamo.utils.counters["graph_break"]
        graph_breaks.clear()
        found.append(step(model, ranks=2))
        assert not graph_breaks
    assert_same_bits(*found)


def test_every_policy_gives_the_same_bits_with_an_auxiliary_loss(calls: Counter[str]) -> None:
    assert_policies_give_the_same_bits(calls, "moba", "seer", "full")
