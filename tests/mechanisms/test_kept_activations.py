"""Layers of mechanisms give the same bits, whatever they keep for the backward pass."""

from collections import Counter
from functools import partial

import pytest
import torch

from moba_train.mechanisms.lora import LoraLinear, LoraOptions
from moba_train.parallel.activations import Kept, LayerActivations, set_activations
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.allgather import AllGather
from tests.parallel.test_activations import (
    CPU,
    HEADS,
    KEYS,
    MODEL,
    TOKENS,
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


def test_of_a_layer_with_adapters_one_result_is_kept(calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The base's product, and the adapters' few columns, but not their sum: counted by what is sent to the host."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = model_of("moba", compiled=True)
    rank = 2
    torch.manual_seed(0)
    for block in model.blocks:
        linears = [module for name, module in block.named_modules() if name.endswith("_proj")]
        assert len(linears) == 7
        for linear in linears:
            LoraLinear.adapt(linear, LoraOptions(r=rank))
    set_activations(model, [LayerActivations(Kept.ALL)], CPU)
    wanted = step(model)
    inner = 2 * MODEL.intermediate_size
    hidden = MODEL.hidden_size
    attention = 2 * hidden + HEADS + HEADS * 2  # its input, its result with the LSE, and the selected blocks
    projections = attention + hidden + 2 * KEYS + hidden + 6 * rank  # no gradient needs the down projection's
    for kept, each in {
        Kept.PRODUCTS: projections + inner,
        Kept.PROJECTIONS: projections,
        Kept.ATTENTION: attention,
    }.items():
        calls.clear()
        set_activations(model, [LayerActivations(kept, on_host=True)], CPU)
        assert_same_bits(step(model), wanted)
        assert calls["sent"] == 2 * TOKENS * each
