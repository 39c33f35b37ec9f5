"""Runs under TRITON_INTERPRET=1, on the CPU; test_triton_interpreter.py starts it. bf16 is left out: the interpreter's
bf16 arithmetic is wrong."""

import os
from dataclasses import replace
from itertools import product

import one_pass_model
import pytest
import torch
from kernel_checks import (
    PACKED,
    build,
    build_summed,
    check_lists,
    error,
    exact,
    inputs,
    layout_of,
    list_bounds,
    run,
    run_in_parts,
)
from quick_interpreter import quicken

from moba_train.attention.blocks import choose, composed, reference
from moba_train.attention.blocks.geometry import block_bound
from moba_train.attention.blocks.triton import attention, call, long_blocks, packed, short_blocks
from moba_train.attention.blocks.triton import choose as triton_choose
from moba_train.attention.blocks.triton.lists import BlockLists
from moba_train.attention.blocks.triton.tiles import TileShape, tile_shapes, work_ranges
from moba_train.attention.decoding import CachedKeys, kernel, last_tokens
from moba_train.attention.gates import grid, msa_operators, seer_operators
from moba_train.attention.infllm_v2.attention import InfLLMV2Attention
from moba_train.attention.infllm_v2.scores import window_means
from moba_train.attention.moa.attention import SpanAttention
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.moba.triton import select
from moba_train.attention.nsa import kernel as nsa_kernel
from moba_train.attention.nsa import selection as nsa_selection
from moba_train.attention.nsa.compressed import CompressedAttention
from moba_train.attention.nsa.geometry import CompressedBlocks
from moba_train.attention.operators import layout_arguments
from moba_train.attention.protocol import BackwardState, Layout, TokenRange, packed_layout

assert os.environ.get("TRITON_INTERPRET") == "1", "start this through test_triton_interpreter.py"
quicken()


def case(lengths, heads, kv_heads, head_dim, dtype=torch.float32, **options):
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
def test_selection_lists_output_and_gradients_equal_the_reference(lengths, heads, kv_heads, head_dim, dtype, options):
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cpu"), layout_of(lengths, "cpu")
    ours, reference = (build(kind, head_dim, **options) for kind in ("triton", "reference"))
    q, k = tensors[:2]
    pooled = ours.summarize(k, layout)
    assert torch.equal(pooled, pool_keys(k, layout, options["block_size"]))
    got, (selected, entries, starts) = run(ours, tensors, layout)
    selection = reference.select(q, pooled, layout)
    assert torch.equal(selected, selection[0])
    shown = ours.describe_selection((selected, entries, starts), layout)
    assert shown.values() == reference.describe_selection(selection, layout).values()
    if selected.numel():
        check_lists(selected, entries, starts, kv_heads, block_bound(layout, options["block_size"]))
    want = exact(tensors, layout, selected, options["block_size"], ours.scale)
    limit = 2e-6 if dtype == torch.float32 else 1e-3
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b) < limit, name


def test_of_equal_gates_the_lower_block_wins_and_infinite_gates_are_candidates():
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
def test_selection_over_many_chunks_is_exact_whatever_the_buckets(count, gates, monkeypatch):
    """Random gates; and gates whose best blocks all share a bucket, which are found in a second pass."""
    monkeypatch.setattr(select, "_CHUNK", 16)
    layout = layout_of([64 * 100, 64 * 20], "cpu")
    ours, reference = (build(kind, 64, block_size=64, topk=count + 1) for kind in ("triton", "reference"))
    own = slice(6390, 6400)  # the last rows of the first document, and the second document
    q = torch.zeros(64 * 120, 1, 64)
    q[..., 0] = 1
    last = Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, ((own.start, own.stop), (7600, 7680)))
    pooled = torch.zeros(122, 1, 64)
    if gates == "random":
        pooled[:, 0, 0] = torch.randn(122, generator=torch.Generator().manual_seed(0))
    elif gates == "one bucket":
        pooled[:, 0, 0] = torch.where(torch.arange(122) % 16 == 5, 10.0 + torch.arange(122) % 7, -1.0)
    selected = [moba.select(q[last.q_tokens], pooled, last)[0] for moba in (ours, reference)]
    assert torch.equal(*selected)


@pytest.mark.parametrize("block_size", [64, 192])
def test_shards_of_queries_and_keys_give_the_whole(block_size):
    """Blocks that straddle the edges of shards, documents that span them, keys of the future."""
    tensors, layout = inputs([250, 1, 79], 2, 1, 64, torch.float32, "cpu"), layout_of([250, 1, 79], "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    want, (selected, *_) = run(ours, tensors, layout)
    got, parts_selected = run_in_parts(ours, tensors, layout, [((0, 37), (300, 330)), ((37, 300),)])
    assert torch.equal(parts_selected, selected)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b.double()) < 2e-6, name


@pytest.mark.parametrize("block_size", [64, 192])
def test_lists_of_several_splits_are_summed(block_size, monkeypatch):
    monkeypatch.setattr(short_blocks, "_SPLIT", 64)
    monkeypatch.setattr(packed, "_SPLIT", 64)
    tensors, layout = inputs([300, 70], 4, 2, 64, torch.float32, "cpu"), layout_of([300, 70], "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    got, selection = run(ours, tensors, layout)
    want = exact(tensors, layout, selection[0], block_size, ours.scale)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b) < 2e-6, name


@pytest.mark.parametrize(("block_size", "limit"), [(64, 1000), (144, 2100)])
def test_work_is_cut_into_work_ranges_without_a_trace(block_size, limit, monkeypatch):
    """Bounded buffers: by key/value heads, and by ranges of queries where one head's partial results are too many."""
    lengths = [300, 45]  # 2,070 entries in two chunks for each key/value head
    tensors, layout = inputs(lengths, 4, 2, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", 64, block_size=block_size, topk=4)
    want, selection = run(ours, tensors, layout)
    seen = []

    def record(lists, kv_heads, most):
        parts = list(work_ranges(lists, kv_heads, most))
        seen.append(len(parts))
        return parts

    for launches in (long_blocks, short_blocks):
        monkeypatch.setattr(launches, "work_ranges", record)
    monkeypatch.setattr(call.BlockCall, "limit", limit)
    got, _ = run(ours, tensors, layout, selection)
    assert max(seen) > 2 if limit == 1000 else max(seen) == 2
    assert all(error(a, b) < 1e-6 for a, b in zip(got, want, strict=True))  # NumPy's products depend on the shape


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "dtype", "options", "limit"),
    [
        # Empty lists, and one of a single row: 129 tokens.
        pytest.param(PACKED, 2, 1, 64, torch.float32, {"block_size": 64, "topk": 3}, 10**9),
        pytest.param(PACKED, 4, 2, 64, torch.float32, {"block_size": 64, "topk": 3}, 600),
        pytest.param([129], 1, 1, 64, torch.float32, {"block_size": 64, "topk": 2}, 600),
        pytest.param([250, 90], 2, 1, 64, torch.float32, {"block_size": 80, "topk": 4}, 600),
        pytest.param([200], 2, 1, 64, torch.float16, {"block_size": 64, "topk": 9}, 600),
        pytest.param([70, 0, 60], 2, 2, 128, torch.float32, {"block_size": 64, "topk": 3}, 600),
    ],
)
def test_packed_rows_give_the_same_gradients(lengths, heads, kv_heads, head_dim, dtype, options, limit, monkeypatch):
    """dk and dv against float64, bit for bit again, in one work range and in several."""
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", head_dim, **options)
    shape = TileShape(32, 64, 4, 2)
    monkeypatch.setattr(call, "tile_shapes", lambda d, b: replace(tile_shapes(d, 4096), dkdv=shape, dkdv_own=shape))
    monkeypatch.setattr(packed, "work_ranges", lambda lists, kv, most: work_ranges(lists, kv, min(limit, most)))
    got, selection = run(ours, tensors, layout)
    again, _ = run(ours, tensors, layout, selection)
    want = exact(tensors, layout, selection[0], options["block_size"], ours.scale)
    bound = 2e-6 if dtype == torch.float32 else 1e-3
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), got, want, again, strict=True):
        assert error(a, b) < bound, name
        assert torch.equal(a, c), name


def test_lists_are_packed_in_order_and_filled_up():
    """Every list's rows in its own tiles; the rest of its last tile has probability 0 whatever the keys."""
    lengths, block_size, rows = [200, 70, 129], 64, 32
    (q, k, v, dout), layout = inputs(lengths, 4, 2, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    selected, entries, starts = ours.select(q, ours.summarize(k, layout), layout)
    sizes = call.BlockCall.from_tensors(q, k, v, layout, selected, block_size, ours.scale)
    sizes = replace(sizes, shapes=replace(sizes.shapes, dkdv=TileShape(rows, 64, 4, 2)))
    blocks = sizes.tables.blocks
    lists = BlockLists.from_tensors(entries, starts, selected, 2, blocks)
    stats = torch.randn(399, 4, 2)
    work = packed.PackedDkdv(sizes, dout, stats, lists)
    (whole,) = work_ranges(lists, 2, 10**9)
    room = work.room([whole])
    (table,) = work.tables([whole])
    work.pack(whole, table, room)
    tiles = table.last_tile.tolist()
    begin, end = (x.tolist() for x in list_bounds(lists))
    assert {0, 2} <= {stop - first for first, stop in zip(begin, end, strict=True)}
    for which, (first, stop) in enumerate(zip(begin, end, strict=True)):
        place = rows * (tiles[which - 1] if which else 0)
        used = slice(place, place + stop - first)
        filling = slice(used.stop, rows * tiles[which])
        row = entries[first:stop] // selected.shape[2]
        token, head = row // 2, which // blocks * 2 + row % 2
        for mine, theirs in ((room.q, q), (room.dout, dout), (room.lse, stats[..., 0]), (room.delta, stats[..., 1])):
            assert torch.equal(mine[used], theirs[token, head])
        assert filling.stop - filling.start < rows
        assert not any(x[filling].any() for x in (room.q, room.dout, room.delta))
        assert room.lse[filling].isposinf().all()


@pytest.mark.parametrize(
    ("lengths", "limit", "kv_heads", "block_size", "topk"),
    [([150, 70], None, 2, 64, 3), ([130, 0, 1, 90], 300, 1, 50, 2)],
)
def test_the_composition_gathers_and_joins_with_kernels(lengths, limit, kv_heads, block_size, topk, monkeypatch):
    if limit:
        monkeypatch.setattr(composed, "entries_at_once", lambda rows, head_dim: limit)
    tensors, layout = inputs(lengths, 4, kv_heads, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("composed", 64, block_size=block_size, topk=topk)
    whole, selection = run(ours, tensors, layout)
    assert len(selection) == 3, "no lists from the kernels"
    shards = [((0, 37), (180, sum(lengths))), ((37, 180),)]
    sharded, selected = run_in_parts(ours, tensors, layout, shards, all_keys=True)
    assert torch.equal(selected, selection[0])
    want = exact(tensors, layout, selection[0], block_size, ours.scale)
    for got in (whole, sharded):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert error(a, b.double()) < 2e-6, name


@pytest.mark.parametrize("merge", ["sum", "gate"])
@pytest.mark.parametrize(("lengths", "limit", "kv_heads"), [([150, 70], None, 2), ([130, 0, 1, 90], 300, 1)])
def test_the_composition_adds_up_blocks_with_kernels(merge, lengths, limit, kv_heads, monkeypatch):
    if limit:
        monkeypatch.setattr(composed, "entries_at_once", lambda rows, head_dim: limit)
    tensors, layout = inputs(lengths, 4, kv_heads, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours, plain = (build_summed(kind, 64, merge, block_size=50, topk=3) for kind in ("composed", "reference"))
    whole, selection = run(ours, tensors, layout)
    weighted = merge == "gate"
    assert len(selection) == 3 + weighted, "no lists from the kernels"
    sharded, _ = run_in_parts(ours, tensors, layout, [((0, 37), (180, sum(lengths))), ((37, 180),)], all_keys=True)
    want, _ = run(plain, [x.double() for x in tensors], layout, selection[: 1 + weighted])
    for got in (whole, sharded):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert error(a, b) < 2e-6, name


@pytest.mark.parametrize("block_size", [16, 160])
def test_a_query_may_attend_to_127_blocks_beside_its_own(block_size):
    """Short and long blocks; every history block, or a random part of them. Blocks of 16 are not offered, but quick."""
    whole = layout_of([128 * block_size], "cpu")
    layout = whole.part((TokenRange(whole.total - 8, whole.total),), None)
    (q, _, _, dout), (_, k, v, _) = (inputs([n], 1, 1, 64, torch.float32, "cpu") for n in (8, whole.total))
    luck_HTN = torch.rand(1, 8, 127, generator=torch.Generator().manual_seed(0))
    some_HTN = torch.where((luck_HTN < 0.9) | (torch.arange(8) < 4).view(-1, 1), torch.arange(127), 127)
    selected = some_HTN.sort(-1).values.to(torch.int32)
    selected = torch.where(selected == 127, -1, selected)
    selection = selected, *attention.block_lists(selected, layout, 1, block_size)
    options = {"block_size": block_size, "scale": 0.125}
    out, lse = attention.attend(q, k, v, layout, selection, **options)
    state = BackwardState(dout, q, k, v, out, lse)
    got = [out, lse, *attention.attend_backward(state, layout, selection, **options)]
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    out, lse = reference.attend(q, k, v, layout, selection, **options)
    state = BackwardState(dout, q, k, v, out, lse)
    want = [out, lse, *reference.attend_backward(state, layout, selection, **options)]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b) < 2e-6, name


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("block_size", [64, 80])
def test_decoding_equals_the_reference(select, block_size, monkeypatch):
    """Two sequences of other lengths, one shorter than its selection, between unused rows of the cache."""
    monkeypatch.setattr(kernel, "_parts", lambda *_sizes: 3)
    lengths, starts, heads, kv_heads, head_dim = [451, 100], [7, 600], 4, 2, 64
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, head_dim, generator=generator)
    k, v = (torch.randn(720, kv_heads, head_dim, generator=generator) for _ in range(2))
    ranges = tuple(TokenRange(start, start + length) for start, length in zip(starts, lengths, strict=True))
    options = {"block_size": block_size, "topk": 3, "select": select, "always": ("first",)}
    layout = last_tokens(lengths, torch.device("cpu"))
    moba = build("reference", head_dim, **options)
    cached = CachedKeys(k, v, ranges, layout, None)
    cached = replace(cached, summaries=moba.summarize(cached.packed_keys(), packed_layout(lengths)))
    (selected,) = moba.select(q, cached.summaries, layout)
    relative = torch.where(selected < 0, -1, selected - torch.tensor([0, -(-451 // block_size)])[:, None]).int()
    relative = relative[:: heads // kv_heads] if select == "group" else relative
    for name, got, want in (
        (
            "listed",
            kernel.decode(q, cached, scale=moba.scale, block_size=block_size, selected_HBC=relative),
            moba.decode(q, cached),
        ),
        ("all", kernel.decode(q, cached, scale=moba.scale), moba.dense.decode(q, cached)),
    ):
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 2e-6, name


def test_spans_of_heads_with_blocks_of_several_sizes():
    """The kind `moa`: heads that share keys, with blocks of 64 and 256 tokens, and one with full attention."""
    options = {"alpha": (64, -200, 0), "beta": (0.0, 0.6, 1.0), "max_length": 6000}
    tensors, layout = inputs([300, 20], 3, 1, 64, torch.float32, "cpu"), layout_of([300, 20], "cpu")
    ours, reference = (
        SpanAttention(SpanAttention.Options(backend=backend, **options), 64) for backend in ("triton", "reference")
    )
    assert [rule.block_size for rule in ours.rules] == [64, 256, 0]
    got, want = (run(attention, tensors, layout)[0] for attention in (ours, reference))
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b.double()) < 2e-6, name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "blocks", "choice"),
    [
        pytest.param(4, 2, 64, CompressedBlocks(4, 2), (8, 5, 1, 2), id="overlaps"),
        pytest.param(3, 1, 128, CompressedBlocks(4, 4), (4, 19, 0, 1), id="no-overlap"),
    ],
)
def test_blocks_chosen_by_compressed_ones_equal_those_of_plain_pytorch(heads, kv_heads, head_dim, blocks, choice):
    """Packed documents and parts of their queries; of equal scores, such as 0 where nothing is seen, the lower id."""
    block_size, topk, first, local = choice
    layout = layout_of([180, 0, 1, 3, 40], "cpu")
    q = inputs([224], heads, kv_heads, head_dim, torch.float32, "cpu")[0]
    k, v = (x.detach() for x in inputs([blocks.bound(layout)], heads, kv_heads, head_dim, torch.float32, "cpu")[1:3])
    _, lse = CompressedAttention(blocks, head_dim, "reference").attend(q, k, v, layout, ())
    ours, plain = (
        nsa_selection.BlockChoice(blocks, block_size, topk, first, local, backend) for backend in ("auto", "reference")
    )
    assert nsa_kernel.able(q, topk - 1)
    whole = plain.choose(q, k, lse, layout, head_dim**-0.5)
    assert (whole >= 0).sum() > 0.5 * whole.numel()
    assert torch.equal(ours.choose(q, k, lse, layout, head_dim**-0.5), whole)
    part = layout.part((TokenRange(100, 120), TokenRange(170, 200)), None)
    rows = part.q_tokens
    assert torch.equal(ours.choose(q[rows], k, lse[:, rows], part, head_dim**-0.5), whole[:, rows])


@pytest.mark.parametrize(("first", "local", "count"), [(1, 3, 7), (0, 1, 3), (2, 2, 40)])
def test_the_highest_scores_are_chosen_as_in_plain_pytorch(first, local, count):
    """Random scores, equal ones, none at all; rows with fewer blocks than are wanted."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 50, 37, generator=generator)
    scores[0, :25] = (scores[0, :25] * 2).round()
    scores[1, ::7, ::3] = -torch.inf
    scores[1, 3] = 0.0
    scores[1, 3, ::2] = -0.0
    first_t = torch.tensor([0] * 20 + [4] * 30)
    queries = choose.QueryBlocks(torch.minimum(first_t + torch.arange(50), torch.tensor(36)), first_t)
    assert triton_choose.able(scores)
    got = choose.choose_blocks(scores, queries, count, first=first, local=local)
    assert torch.equal(got, choose.choose_blocks(scores.double(), queries, count, first=first, local=local))


INFLLM_V2 = {"block_size": 64, "topk": 5, "first_blocks": 1, "local_blocks": 2, "window": 32, "stride": 16}


@pytest.mark.parametrize("sizes", [{}, {"window": 48, "block_size": 96}], ids=str)
def test_scores_of_blocks_equal_plain_pytorch(sizes, monkeypatch):
    """In chunks of queries, over documents, for the queries of a shard."""
    options = InfLLMV2Attention.Options(**INFLLM_V2 | sizes, dense_len=1)
    whole = layout_of([190, 0, 1, 20, 90], "cpu")
    layout = whole.part((TokenRange(30, 180), TokenRange(230, 301)), None)
    (q, k, *_), attention = inputs([301], 2, 1, 64, torch.float32, "cpu"), InfLLMV2Attention(options, 64)
    windows = window_means(attention.summarize(k, whole), options.sizes)
    monkeypatch.setattr("moba_train.attention.masked._SCORES_PER_CHUNK", {"cpu": 6000})
    scores = torch.full((2, len(layout.q_tokens), 8), torch.nan)
    for which, kernels in enumerate((True, False)):
        for rows, blocks, found in attention.scores.chunks(q[layout.q_tokens], windows, layout, kernels=kernels):
            scores[which, rows, blocks] = found[0]
    sees = layout.positions(layout.q_tokens, layout.q_documents) + 1 >= options.window
    kernel, plain = (x[sees & ~scores.isnan().any(0).all(-1)] for x in scores)
    compared = ~(kernel.isnan() | plain.isnan())
    assert (kernel[compared] > 0).float().mean() > 0.3
    torch.testing.assert_close(kernel[compared], plain[compared], rtol=1e-5, atol=1e-6)


def infllm_v2(lengths, heads, **options):
    """An attention of local and selected blocks, its inputs and their layout; one key/value head."""
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**INFLLM_V2 | {"topk": 3} | options, backend="triton"), 64)
    return attention, inputs(lengths, heads, 1, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")


def assert_selected_and_local(attention, tensors, layout, found, selection):
    """The results are those of one mask over all blocks, of which more than the selected ones are local."""
    selected = attention.selected_blocks(selection)
    assert (selected >= 0).sum() > len(selected) * (selection[0] >= 0).sum() > 0
    want = exact(tensors, layout, selected, attention.block_size, attention.scale)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, want, strict=True):
        assert error(a, b) < 2e-6, name


def test_local_and_selected_blocks_share_one_softmax_from_shard_to_shard(monkeypatch):
    """Short blocks, whose lists are cut into work ranges."""
    attention, tensors, layout = infllm_v2([210, 0, 1, 20], 2, dense_len=1)
    monkeypatch.setattr(call.BlockCall, "limit", 100)
    found, _ = run_in_parts(attention, tensors, layout, [((0, 37), (150, 231)), ((37, 150),)])
    selection = attention.select(tensors[0], attention.summarize(tensors[1], layout), layout)
    assert_selected_and_local(attention, tensors, layout, found, selection)


def test_local_and_selected_blocks_may_be_long():
    attention, tensors, layout = infllm_v2([480, 10], 1, dense_len=200, block_size=192, local_blocks=1)
    assert_selected_and_local(attention, tensors, layout, *run(attention, tensors, layout))


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "widths", "block_size", "count", "dtype", "ranges"),
    [
        ([130, 0, 1, 70], 4, 2, (64, 64), 64, 1, torch.float32, None),
        ([150, 40], 3, 1, (64, 32), 80, 9, torch.float16, None),
        ([210], 2, 1, (128, 64), 200, 1, torch.float32, None),
        ([200, 20], 2, 1, (64, 16), 40, 2, torch.float32, ((40, 70), (150, 201))),
        ([90], 9, 9, (64, 16), 64, 1, torch.float32, None),
    ],
)
def test_index_branches_select_and_learn_as_in_plain_pytorch(
    lengths, heads, kv_heads, widths, block_size, count, dtype, ranges, monkeypatch
):
    """Selected blocks, the divergence and its gradients: over the selected blocks, and over all of them."""
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 1000 * kv_heads)  # several chunks
    layout = layout_of(lengths, "cpu")
    if ranges:
        layout = layout.part(tuple(TokenRange(*given) for given in ranges), None)
    where, queries, width = layout_arguments(layout), len(layout.q_tokens), widths[0]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k = random(queries, heads, width), random(layout.total, kv_heads, width)
    index = random(queries, kv_heads, widths[1]), random(layout.total, widths[1])
    lse, weights = 4 + random(heads, queries).float(), random(queries).float()
    ours, plain = (msa_operators.select(*index, *where, block_size, count, in_plain) for in_plain in (False, True))
    assert torch.equal(ours, plain)
    for selected in (None, plain):
        results = []
        for in_plain in (False, True):
            leaves = [x.clone().requires_grad_() for x in index]
            sizes = block_size, width**-0.5, in_plain
            divergence = msa_operators.distill(*leaves, q, k, lse, selected, *where, *sizes)
            results.append([divergence.detach(), *torch.autograd.grad(divergence, leaves, weights)])
        for name, a, b in zip(("divergence", "dq", "dk"), *results, strict=True):
            assert error(a, b.double()) < (2e-6 if dtype == torch.float32 else 2e-3), name


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "ranges"),
    [(4, 2, 64, None), (3, 1, 40, ((40, 70), (150, 201)))],
)
def test_largest_probabilities_of_two_blocks_equal_plain_pytorch(heads, kv_heads, block_size, ranges):
    layout = layout_of([150, 0, 1, 60], "cpu")
    q, k, _, _ = inputs([211], heads, kv_heads, 64, torch.float32, "cpu")
    lse = 4 + torch.randn(heads, 211, generator=torch.Generator().manual_seed(0))
    layout = layout.part(tuple(TokenRange(*given) for given in ranges), None) if ranges else layout
    rows = layout.q_tokens
    ours, plain = (
        seer_operators.attention_map(
            q[rows], k, lse[:, rows], *layout_arguments(layout), block_size, 64**-0.5, in_plain
        )
        for in_plain in (False, True)
    )
    assert (plain[0] > 0).any()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options", "own"),
    [
        (4, 2, {"block_size": 256, "topk": 3}, True),  # work ranges by heads
        (2, 1, {"block_size": 256, "topk": 3}, False),  # by queries
    ],
)
def test_launches_of_one_pass_add_up(heads, kv_heads, options, own, monkeypatch):
    """Packed rows, places, turns and sums; the two kernels' arithmetic is PyTorch's here."""
    one_pass_model.use(monkeypatch, own=own)
    monkeypatch.setattr("moba_train.attention.blocks.triton.one_pass._SHORT_SPLIT", 128)
    lengths = [600, 1, 70]
    q, k, v, dout = tensors = inputs(lengths, heads, kv_heads, 64, torch.float32, "cpu")
    layout, ours = layout_of(lengths, "cpu"), build("triton", 64, **options)
    selection = ours.select(q, ours.summarize(k, layout), layout)
    out, lse, *want = exact(tensors, layout, selection[0], 256, ours.scale)
    got = ours.attend_backward(BackwardState(dout, q, k, v, out.float(), lse.float()), layout, selection)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert error(a, b) < 2e-6, name
