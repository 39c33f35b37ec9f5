"""`key_conv`, a short convolution over MoBA's keys: against loops in float64, on ranks; off, nothing changes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moba_train.attention.kind import MicroBatch
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.key_convolution import previous
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.registry import KINDS
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    run_layer,
)
from tests.thread_ranks import thread_transports

LENGTHS = [12, 0, 1, 27]
SMALL = {"block_size": 4, "topk": 3}
CONV = {"key_conv": 3}
widths = pytest.mark.parametrize("width", [3, 5])


def mixed(x: torch.Tensor, weight: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Sum over `back` of weight[:, back] * x[token - back], token by token, from the document's first token on."""
    taps = weight.T.unflatten(1, x.shape[1:])
    rows, start = [], 0
    for length in lengths:
        for position in range(length):
            token = start + position
            rows.append(sum(taps[back] * x[token - back] for back in range(min(len(taps), position + 1))))
        start += length
    return torch.stack(rows)


@widths
def test_output_and_every_gradient_are_those_of_convolved_keys(width: int) -> None:
    assert_equals_convolved_keys("moba", width)


def assert_equals_convolved_keys(kind: str, width: int) -> None:
    """Output and gradients of a kind with `key_conv` are its own for keys that were convolved before."""
    layer = make_layer(kind, {**SMALL, "key_conv": width}, LENGTHS)
    assert layer.named_parameters()["weight"].shape == (2 * 8, width)

    def plain(layer: Layer) -> Any:
        keys = layer.k + F.silu(mixed(layer.k, layer.parameters.weight, LENGTHS))
        without = KINDS[kind](KINDS[kind].Options(**SMALL), 8)
        return run_layer(Layer(without, None, layer.x, layer.q, keys, layer.v, layer.layout, layer.model))

    got, want = results(layer), results(layer, plain)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    assert want[2]["weight"].any(0).all()


def test_without_it_nothing_changes_and_at_first_with_it_neither() -> None:
    plain, off, on = (make_layer("moba", {**SMALL, **extra}, LENGTHS) for extra in ({}, {"key_conv": 0}, CONV))
    assert off.parameters is None
    nn.init.zeros_(on.parameters.weight)
    initial = MobaKind.initial_values("weight", torch.Size([3, 2]), torch.Generator())
    assert initial is not None
    assert not initial.any()
    on = replace(on, x=plain.x, q=plain.q, k=plain.k, v=plain.v)
    want = results(plain)
    for layer in (off, on):
        got = results(layer)
        for a, b in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
            assert torch.equal(a, b)
    assert results(on)[2]["weight"].any(), "it could not learn"


MORE_STRATEGIES = [*STRATEGIES, CPStrategy(4, "allgather", "zigzag", 4)]


@widths
@pytest.mark.parametrize("strategy", MORE_STRATEGIES, ids=str)
def test_ranks_that_share_a_sequence(width: int, strategy: CPStrategy) -> None:
    """Also shards and ranges that are shorter than the convolution, and a rank without tokens."""
    for lengths in (LENGTHS, [5, 4], [9]):
        assert_ranks_equal_one_device(make_layer("moba", {**SMALL, "key_conv": width}, lengths), strategy)


@widths
def test_packed_documents(width: int) -> None:
    assert_documents_are_independent("moba", {**SMALL, "key_conv": width}, [*LENGTHS, 2, 3, 1])


def test_a_compiled_layer_gives_equal_numbers() -> None:
    layer = make_layer("moba", {**SMALL, "key_conv": 3}, LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    torch.testing.assert_close(results(layer, compiled), results(layer), rtol=0, atol=1e-12)


def test_the_plan_counts_its_parameters_and_operations() -> None:
    off, on = (MobaKind(MobaKind.Options(**SMALL, key_conv=width), 8) for width in (0, 3))
    weights = MODEL.kv_heads * 8 * 3
    assert on.flops(MODEL, LENGTHS) == off.flops(MODEL, LENGTHS) + 6 * weights * sum(LENGTHS)
    batch = MicroBatch(width=2, seq_len=64, tokens=64, cp=1)
    without, with_it = (kind.token_bytes(MODEL, batch).saved for kind in (off, on))
    assert with_it == without + 2 * MODEL.kv_heads * 8 * 4


@st.composite
def shared_sequences(draw: st.DrawFn) -> tuple[CPStrategy, list[int]]:
    """Also ranges shorter than the rows before them, so that a token comes before two ranges of a rank."""
    ranks = draw(st.integers(1, 6))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=3).filter(lambda found: sum(found) >= ranks))
    return CPStrategy(ranks, "allgather", draw(st.sampled_from(["contiguous", "zigzag"])), ranks), lengths


@given(shared_sequences(), st.integers(1, 12))
@settings(max_examples=25)
def test_previous_rows_arrive_from_their_ranks_and_gradients_return(
    shared: tuple[CPStrategy, list[int]], count: int
) -> None:
    strategy, lengths = shared
    layout = packed_layout(lengths)
    x_TD = torch.randn(sum(lengths), 2, dtype=torch.float64, requires_grad=True)
    documents = x_TD.split(lengths)
    padded = [torch.cat([document.new_zeros(count, 2), document]) for document in documents]
    want_cTD = torch.stack(
        [torch.cat([rows[count - 1 - back : len(rows) - 1 - back] for rows in padded]) for back in range(count)]
    )
    weight_cTD = torch.randn_like(want_cTD)
    (want_grad_TD,) = torch.autograd.grad((want_cTD * weight_cTD).sum(), x_TD)

    def rank(engine: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shard = engine.shard(layout)
        tokens = shard.layout.q_tokens
        own_nD = x_TD.detach()[tokens].requires_grad_()
        found_cnD = previous(own_nD, "k", count, shard)
        (grad_nD,) = torch.autograd.grad((found_cnD * weight_cTD[:, tokens]).sum(), own_nD)
        return tokens, found_cnD.detach(), grad_nD

    engines = [ContextParallel(strategy, transport) for transport in thread_transports(strategy)[0]]
    with ThreadPoolExecutor(strategy.ranks) as pool:
        for tokens, found_cnD, grad_nD in pool.map(rank, engines):
            assert torch.equal(found_cnD, want_cTD[:, tokens])
            torch.testing.assert_close(grad_nD, want_grad_TD[tokens])
