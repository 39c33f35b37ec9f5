"""Attention over a sharded sequence equals attention on one device. Ranks are threads, numbers are float64."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moba_train import registry
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import Layout, TokenRanges
from moba_train.attention.observer import StatisticsObserver
from moba_train.attention.statistics import Statistics
from moba_train.config.parallel import CPLayout
from moba_train.parallel.context.strategy import CPStrategy
from tests.parallel.context.context_cases import (
    Case,
    assert_same,
    for_the_same_selection,
    on_one_device,
    on_threads,
)
from tests.thread_ranks import ThreadCommunicator

TRANSPORTS = ("ring in parts", *registry.TRANSPORTS)
LAYOUTS: tuple[CPLayout, ...] = ("contiguous", "zigzag")


def strategy(transport: str, layout: CPLayout, ranks: int = 4) -> CPStrategy:
    """`ring in parts`: over two nodes, so that it attends to the chunks of two ranks at once."""
    node_size = 2 if transport in ("hierarchical", "ring in parts") else ranks
    return CPStrategy(ranks, transport.removesuffix(" in parts"), layout, node_size)


def check(how: CPStrategy, case: Case) -> None:
    inputs = case.inputs()
    want, got = on_one_device(case, inputs), on_threads(how, case, inputs)
    assert_same(got.tensors, want.tensors)
    if got.selected is None or want.selected is None:
        assert got.selected is want.selected
    else:
        assert torch.equal(got.selected, want.selected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((32,)), id="aligned"),
        pytest.param(Case((37,)), id="tail"),
        pytest.param(Case((12, 0, 1, 27)), id="documents"),
        pytest.param(Case((41,), block_size=16), id="blocks longer than shards"),
        pytest.param(Case((37,), topk=1), id="own block only"),
        pytest.param(Case((37,), topk=99), id="every block"),
        pytest.param(Case((37,), topk=None), id="dense"),
        pytest.param(Case((5, 20, 13), topk=None, heads=8, kv_heads=8), id="dense documents, no sharing"),
        pytest.param(Case((37,), heads=4, kv_heads=1), id="one key/value head"),
        pytest.param(Case((37,), 8, 4, options={"select": "group", "always": ("current", "first")}), id="group"),
        pytest.param(Case((4,)), id="one token per rank"),
        pytest.param(Case((5,)), id="a rank without tokens"),
    ],
)
def test_equal_to_one_device(case: Case, transport: str, layout: CPLayout) -> None:
    check(strategy(transport, layout), case)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_to_one_device_at_random_sizes(data: st.DataObject) -> None:
    transport = data.draw(st.sampled_from(list(registry.TRANSPORTS)))
    sizes = {"hierarchical": [4, 6], "ring": [1, 2, 3, 4, 6, 8]}.get(transport, [1, 2, 3, 4, 5])
    ranks = data.draw(st.sampled_from(sizes))
    node = data.draw(st.sampled_from([n for n in (2, 3) if 1 < n < ranks and ranks % n == 0] or [ranks]))
    among = {"ulysses": ranks, "hierarchical": node}.get(transport, 1)
    kv_heads = data.draw(st.sampled_from([k for k in (1, 2, 3) if k % among == 0 or among % k == 0] or [among]))
    heads = kv_heads * among * data.draw(st.sampled_from([1, 2]))
    lengths = data.draw(st.lists(st.integers(0, 24), min_size=1, max_size=4).filter(lambda x: sum(x) >= ranks))
    case = Case(
        tuple(lengths),
        heads,
        kv_heads,
        block_size=data.draw(st.integers(1, 12)),
        topk=data.draw(st.sampled_from([None, 1, 2, 3, 9])),
    )
    depth = data.draw(st.sampled_from([None, 2, 3, 4])) if transport == "ring" else None
    if transport == "ring":
        node = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    slices = data.draw(st.integers(1, 4))
    check(CPStrategy(ranks, transport, data.draw(st.sampled_from(LAYOUTS)), node, depth, slices), case)


class SharedObserver(StatisticsObserver):
    """That threads share, one after the other: adding up reads what is there and writes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def report(self, statistics: Statistics) -> None:
        with self._lock:
            super().report(statistics)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_routing_statistics_of_the_ranks_join_to_those_of_one_device(transport: str, layout: CPLayout) -> None:
    """Load and entropy are left out: a rank has them for its own queries."""

    case = Case((60, 3, 37), options={"always": ("current", "first")}, topk=4)
    means = []
    for run in (on_one_device, partial(on_threads, strategy(transport, layout))):
        watched = SharedObserver()
        run(case, case.inputs(), watched)
        means.append(watched.statistics.values)
    one, ranks = ({name: mean[name] for name in ("key_share", "first_block_share", "distance")} for mean in means)
    assert ranks == pytest.approx(one)


def test_selecting_every_block_is_dense_attention() -> None:
    sparse, dense = Case((40, 9), topk=99), Case((40, 9), topk=None)
    inputs = sparse.inputs()
    want = on_one_device(dense, inputs).tensors
    for transport, layout in product(TRANSPORTS, LAYOUTS):
        assert_same(on_threads(strategy(transport, layout), sparse, inputs).tensors, want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_changed_token_moves_only_what_may_see_it(transport: str) -> None:
    """It may change itself and later tokens of its document; no other bit may change."""
    case, token = Case((11, 20, 9), topk=3), 17
    inputs = case.inputs()
    how = strategy(transport, "zigzag")
    before = on_threads(how, case, inputs).tensors[0]
    for changed in (1, 2):  # k, v
        moved = [x.clone() for x in inputs]
        moved[changed][token] += 1
        after = on_threads(how, case, moved).tensors[0]
        rows = (after != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert rows, "the token itself sees its change"
        assert set(rows) <= set(range(token, 31)), rows


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_selects_the_same_blocks_and_is_as_exact_as_one_device(transport: str, layout: CPLayout) -> None:
    case = Case((37, 43), dtype=torch.bfloat16)
    inputs = case.inputs()
    one, many = on_one_device(case, inputs), on_threads(strategy(transport, layout), case, inputs)
    want = for_the_same_selection(case, one.selected, inputs)
    assert many.selected is not None
    assert one.selected is not None
    assert torch.equal(many.selected, one.selected)
    for ours, single, truth in zip(many.tensors, one.tensors, want, strict=True):
        worst = [(x.double() - truth).abs().max().item() for x in (ours, single)]
        assert worst[0] <= 1.5 * worst[1] + 1e-2  # a bf16 unit in the last place of numbers around 2


def test_two_runs_give_the_same_bits() -> None:
    case = Case((37, 6))
    inputs = case.inputs()
    for transport in TRANSPORTS:
        first, second = (on_threads(strategy(transport, "zigzag"), case, inputs) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


@pytest.mark.parametrize(
    ("ring", "before_each_attention"),
    [
        (CPStrategy(8, "ring", "contiguous", 8, 2), [2, 3, 4, 5, 6, 7, 7, 7]),
        (CPStrategy(8, "ring", "contiguous", 8, 3), [4, 6, 7, 7]),
        (CPStrategy(8, "ring", "contiguous", 4), [7, 7]),
        (CPStrategy(8, "ring", "contiguous", 1), [7] * 8),
    ],
    ids=["two buffers", "three buffers", "two nodes", "eight nodes"],
)
def test_the_ring_sends_chunks_on_before_it_attends(
    ring: CPStrategy, before_each_attention: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the rank that sees every chunk, all buffers receive while attention is at work."""
    begun: dict[int, int] = {}
    counts: list[int] = []
    send_recv = ThreadCommunicator.send_recv
    attend = FullAttention.attend

    def counted_send_recv(communicator: ThreadCommunicator, *args: Any, **options: Any) -> Any:
        begun[threading.get_ident()] = begun.get(threading.get_ident(), 0) + 1
        return send_recv(communicator, *args, **options)

    def counted_attend(
        attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, selection: Any
    ) -> Any:
        if layout.q_ranges == ((28, 32),):
            counts.append(begun[threading.get_ident()])
        return attend(attention, q, k, v, layout, selection)

    monkeypatch.setattr(ThreadCommunicator, "send_recv", counted_send_recv)
    monkeypatch.setattr(FullAttention, "attend", counted_attend)
    case = Case((32,), topk=None)
    on_threads(ring, case, case.inputs())
    assert counts == before_each_attention


@pytest.mark.parametrize("depth", [None, 5])
def test_a_ring_inside_a_node_attends_to_all_keys_in_one_call(
    depth: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels for all keys of a sequence are faster than those for a part of them."""
    calls: dict[str, list[TokenRanges | None]] = {"attend": [], "attend_backward": []}
    for name, keys in calls.items():
        function = getattr(FullAttention, name)

        def recorded(*arguments: Any, function: Callable[..., Any] = function, keys: list[Any] = keys) -> Any:
            (layout,) = (x for x in arguments if isinstance(x, Layout))
            keys.append(layout.k_ranges)
            return function(*arguments)

        monkeypatch.setattr(FullAttention, name, recorded)
    case = Case((32,), topk=None)
    on_threads(CPStrategy(8, "ring", "zigzag", 8, depth), case, case.inputs())
    assert calls == {"attend": [None] * 8, "attend_backward": [None] * 8}
