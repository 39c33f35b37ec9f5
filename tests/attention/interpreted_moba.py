"""MoBA in Triton's interpreter: selection, lists, output and gradients, in shards and in bounded memory."""

from itertools import product
from typing import Any

import pytest
import torch

from moba_train.attention.kernels.common import call, reference
from moba_train.attention.kernels.common.geometry import block_bound
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import WorkRange, tile_shapes, work_ranges
from moba_train.attention.kernels.triton import backend, blocks_from_144_dkdv, blocks_from_144_forward, blocks_to_128
from moba_train.attention.layout import Layout, TokenRange
from moba_train.attention.moba import gate_kernels
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.protocol import BackwardState
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import (
    PACKED,
    assert_results,
    build,
    check_lists,
    error,
    exact,
    inputs,
    layout_of,
    run,
    run_in_parts,
)
from tests.attention.quick_interpreter import quicken

quicken()


def case(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, **options: Any
) -> "pytest.ParameterSet":
    return pytest.param(lengths, heads, kv_heads, head_dim, dtype, options)


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"),
    [
        case([300], 2, 1, 64, block_size=64, topk=3),
        case(PACKED, 4, 2, 64, block_size=64, topk=3),
        case(PACKED, 2, 2, 64, block_size=64, topk=1),
        case([300], 3, 1, 128, block_size=64, topk=2),
        case([400], 4, 2, 64, block_size=80, topk=4, select="group", always=("current", "previous", "first")),
        case([330], 1, 1, 64, block_size=64, topk=3, always=("first",)),
        case([150, 40], 8, 1, 64, torch.float16, block_size=64, topk=9),
        case([0, 0], 2, 1, 64, block_size=64, topk=3),
        case([1100], 1, 1, 64, block_size=512, topk=2),
    ],
)
def test_selection_lists_output_and_gradients_equal_the_reference(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cpu"), layout_of(lengths, "cpu")
    ours, reference = (build(kind, head_dim, **options) for kind in ("triton", "reference"))
    q, k = tensors[:2]
    pooled = ours.summarize(k, layout)
    assert torch.equal(pooled, pool_keys(k, layout, options["block_size"]))
    got, (selected, slots, starts) = run(ours, tensors, layout)
    selection = reference.select(q, pooled, layout)
    assert torch.equal(selected, selection[0])
    shown = ours.describe_selection((selected, slots, starts), layout)
    assert shown.values == reference.describe_selection(selection, layout).values
    if selected.numel():
        check_lists(selected, slots, starts, kv_heads, block_bound(layout, options["block_size"]))
    want = exact(tensors, layout, selected, options["block_size"], ours.scale)
    limit = 2e-6 if dtype == torch.float32 else 1e-3
    assert_results(got, want, limit)


def test_of_equal_gates_the_lower_block_wins_and_infinite_gates_are_candidates() -> None:
    layout = layout_of([640], "cpu")
    ours = build("triton", 64, block_size=64, topk=4)
    q = torch.zeros(640, 1, 64)
    q[..., 0] = 1
    for gates, want in (
        ([0] * 10, [0, 1, 2]),
        ([1, 2, 1, 2, 1, 2, 2, 0, 0, 0], [1, 3, 5]),
        ([float("-inf")] * 10, [0, 1, 2]),
        ([float("-inf"), float("inf"), 1, float("inf"), 2, 0, 0, 0, 0, 0], [1, 3, 4]),
    ):
        pooled = torch.zeros(11, 1, 64)
        pooled[:10, 0, 0] = torch.tensor(gates, dtype=torch.float32)
        pooled[:10, 0, 1:] = 0 if max(gates) < float("inf") and min(gates) > float("-inf") else 1
        assert ours.select(q, pooled, layout)[0][0, 639].tolist() == want


@pytest.mark.parametrize(
    ("count", "gates"), [*product([3, 6, 17], ["random", "one bucket", "all equal"]), (127, "one bucket")]
)
def test_selection_over_many_chunks_is_exact_whatever_the_buckets(
    count: int, gates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random gates; and gates whose best blocks all share a bucket, which are found in a second pass."""
    monkeypatch.setattr(gate_kernels, "_CHUNK", 16)
    layout = layout_of([64 * 100, 64 * 20], "cpu")
    ours, reference = (build(kind, 64, block_size=64, topk=count + 1) for kind in ("triton", "reference"))
    own = slice(6390, 6400)  # the last rows of the first document, and the second document
    q = torch.zeros(64 * 120, 1, 64)
    q[..., 0] = 1
    last = Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, ranges((own.start, own.stop), (7600, 7680)))
    pooled = torch.zeros(122, 1, 64)
    if gates == "random":
        pooled[:, 0, 0] = torch.randn(122, generator=torch.Generator().manual_seed(0))
    elif gates == "one bucket":
        pooled[:, 0, 0] = torch.where(torch.arange(122) % 16 == 5, 10.0 + torch.arange(122) % 7, -1.0)
    selected = [moba.select(q[last.q_tokens], pooled, last)[0] for moba in (ours, reference)]
    assert torch.equal(*selected)


@pytest.mark.parametrize("block_size", [64, 192])
def test_shards_of_queries_and_keys_give_the_whole(block_size: int) -> None:
    """Blocks that straddle the edges of shards, documents that span them, keys of the future."""
    tensors, layout = inputs([250, 1, 79], 2, 1, 64, torch.float32, "cpu"), layout_of([250, 1, 79], "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    want, (selected, *_) = run(ours, tensors, layout)
    got, parts_selected = run_in_parts(ours, tensors, layout, [ranges((0, 37), (300, 330)), ranges((37, 300))])
    assert torch.equal(parts_selected, selected)
    assert_results(got, want)


@pytest.mark.parametrize("block_size", [64, 192])
def test_lists_of_several_splits_are_summed(block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_to_128, "_SPLIT", 64)
    monkeypatch.setattr(blocks_from_144_dkdv, "_SPLIT", 64)
    tensors, layout = inputs([300, 70], 4, 2, 64, torch.float32, "cpu"), layout_of([300, 70], "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    got, selection = run(ours, tensors, layout)
    want = exact(tensors, layout, selection[0], block_size, ours.scale)
    assert_results(got, want)


@pytest.mark.parametrize(("block_size", "limit"), [(64, 1000), (144, 2100)])
def test_work_is_cut_into_work_ranges_without_a_trace(
    block_size: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded buffers: by key/value heads, and by ranges of queries where one head's partial results are too many."""
    lengths = [300, 45]  # 2,070 slots in two chunks for each key/value head
    tensors, layout = inputs(lengths, 4, 2, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", 64, block_size=block_size, topk=4)
    want, selection = run(ours, tensors, layout)
    seen = []

    def record(lists: BlockLists, kv_heads: int, most: int) -> list[WorkRange]:
        parts = list(work_ranges(lists, kv_heads, most))
        seen.append(len(parts))
        return parts

    for launches in (blocks_from_144_forward, blocks_to_128):
        monkeypatch.setattr(launches, "work_ranges", record)
    monkeypatch.setattr(call.BlockCall, "limit", limit)
    got, _ = run(ours, tensors, layout, selection)
    assert max(seen) > 2 if limit == 1000 else max(seen) == 2
    assert all(error(a, b) < 1e-6 for a, b in zip(got, want, strict=True))  # NumPy's products depend on the shape


@pytest.mark.parametrize(("of_one_head", "ranges"), [(300 * 4 * 3 * 256, 1), (300 * 4 * 3 * 256 - 1, 2), (1, 2)])
def test_queries_of_a_head_are_cut_where_its_partial_results_are_large(
    of_one_head: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head has three slots a query; two are allowed in any case."""
    (q, k, v, _), layout = inputs([300], 4, 1, 64, torch.float32, "cpu"), layout_of([300], "cpu")
    monkeypatch.setattr(call, "_ONE_HEAD", of_one_head)
    ours = build("triton", 64, block_size=64, topk=4)
    selected, slots, starts = ours.blocks.empty_selection(3, q, layout, kv_heads=1)
    made = call.BlockCall.from_tensors(q, k, v, layout, selected, 64, 1.0)
    lists = BlockLists.from_tensors(slots, starts, selected, 1, made.tables.blocks)
    assert len(list(work_ranges(lists, 1, made.limit))) == ranges


@pytest.mark.parametrize("long", [False, True])
def test_a_query_may_attend_to_127_blocks_beside_its_own(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of short and of long blocks; every history block, or a random part of them. Blocks of 16 are not
    offered, but quick."""
    block_size = 16
    passes = ("blocks_from_144_forward", "blocks_from_144_dq") if long else ("blocks_to_128", "blocks_to_128")
    for name, file in zip(("forward_pass", "backward_pass"), passes, strict=True):
        monkeypatch.setattr(call.BlockCall, name, f"triton/{file}.py")
    if long:
        monkeypatch.setattr(call, "tile_shapes", lambda head_dim, *_: tile_shapes(head_dim, 4096))
    whole = layout_of([128 * block_size], "cpu")
    layout = whole.part((TokenRange(whole.total - 8, whole.total),), None)
    (q, _, _, dout), (_, k, v, _) = (inputs([n], 1, 1, 64, torch.float32, "cpu") for n in (8, whole.total))
    luck_HTN = torch.rand(1, 8, 127, generator=torch.Generator().manual_seed(0))
    some_HTN = torch.where((luck_HTN < 0.9) | (torch.arange(8) < 4).view(-1, 1), torch.arange(127), 127)
    selected = some_HTN.sort(-1).values.to(torch.int32)
    selected = torch.where(selected == 127, -1, selected)
    selection = selected, *backend.block_lists(selected, layout, 1, block_size)
    options: dict[str, Any] = {"block_size": block_size, "scale": 0.125}
    out, lse = backend.attend(q, k, v, layout, selection, **options)
    state = BackwardState(dout, q, k, v, out, lse)
    got = [out, lse, *backend.attend_backward(state, layout, selection, **options)]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = reference.attend(q, k, v, layout, selection, **options)
    state = BackwardState(dout, q, k, v, out, lse)
    want = [out, lse, *reference.attend_backward(state, layout, selection, **options)]
    assert_results(got, want)


def test_the_lists_of_three_short_documents_are_those_of_the_example() -> None:
    """The example in the docstring of common/lists.py, by the kernels."""
    selected = torch.full((2, 17, 1), -1, dtype=torch.int32)
    selected[:, 4], selected[:, 12:16], selected[0, 16], selected[1, 16] = 0, 3, 4, 3
    slots, starts = backend.block_lists(selected, layout_of([5, 3, 9], "cpu"), 1, 4)
    lists = BlockLists.from_tensors(slots, starts, selected, 1, 7)
    assert slots[:12].tolist() == [8, 9, 24, 25, 26, 27, 28, 29, 30, 31, 33, 32]
    assert starts[:: lists.chunks].tolist() == [0, 2, 2, 2, 11, 12, 12, 12]
