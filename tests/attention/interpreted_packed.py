"""Gradients of long blocks from packed rows, in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moba_train.attention.kernels.common import call
from moba_train.attention.kernels.common.lists import BlockLists
from moba_train.attention.kernels.common.tiles import TileShape, tile_shapes, work_ranges
from moba_train.attention.kernels.hopper import blocks_256_to_4096_gradients
from moba_train.attention.kernels.triton import blocks_from_144_dkdv
from moba_train.attention.protocol import BackwardState
from tests.attention import one_pass_model
from tests.attention.kernel_checks import PACKED, assert_results, build, exact, inputs, layout_of, list_bounds, run
from tests.attention.quick_interpreter import quicken

quicken()


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
def test_packed_rows_give_the_same_gradients(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dk and dv against float64, bit for bit again, in one work range and in several."""
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", head_dim, **options)
    shape = TileShape(32, 64, 4, 2)
    monkeypatch.setattr(
        call, "tile_shapes", lambda d, b, *_: replace(tile_shapes(d, 4096), dkdv=shape, dkdv_diagonal=shape)
    )
    monkeypatch.setattr(call.BlockCall, "forward_pass", "triton/blocks_from_144_forward.py")
    monkeypatch.setattr(call.BlockCall, "backward_pass", "triton/blocks_from_144_dq.py")
    monkeypatch.setattr(
        blocks_from_144_dkdv, "work_ranges", lambda lists, kv, most: work_ranges(lists, kv, min(limit, most))
    )
    got, selection = run(ours, tensors, layout)
    want = exact(tensors, layout, selection[0], options["block_size"], ours.scale)
    assert_results(got, want, 2e-6 if dtype == torch.float32 else 1e-3)
    q, k, v, dout = tensors
    again = ours.attend_backward(BackwardState(dout, q, k, v, *got[:2]), layout, selection)
    for name, a, b in zip(("dq", "dk", "dv"), got[2:], again, strict=True):
        assert torch.equal(a, b), name


def test_lists_are_packed_in_order_and_filled_up() -> None:
    """Every list's rows in its own tiles; the rest of its last tile has probability 0 whatever the keys."""
    lengths, block_size, rows = [200, 70, 129], 64, 32
    (q, k, v, dout), layout = inputs(lengths, 4, 2, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("triton", 64, block_size=block_size, topk=3)
    selected, slots, starts = ours.select(q, ours.summarize(k, layout), layout)
    sizes = call.BlockCall.from_tensors(q, k, v, layout, selected, block_size, ours.scale)
    sizes = replace(sizes, shapes=replace(sizes.shapes, dkdv=TileShape(rows, 64, 4, 2)))
    blocks = sizes.tables.blocks
    lists = BlockLists.from_tensors(slots, starts, selected, 2, blocks)
    stats = torch.randn(399, 4, 2)
    work = blocks_from_144_dkdv.PackedDkdv(sizes, dout, stats, lists)
    (whole,) = work_ranges(lists, 2, 10**9)
    packed = work.allocate([whole])
    (table,) = work.tables([whole])
    work.pack(whole, table, packed)
    tiles = table.last_tile.tolist()
    begin, end = (x.tolist() for x in list_bounds(lists))
    assert {0, 2} <= {stop - first for first, stop in zip(begin, end, strict=True)}
    for which, (first, stop) in enumerate(zip(begin, end, strict=True)):
        first_row = rows * (tiles[which - 1] if which else 0)
        used = slice(first_row, first_row + stop - first)
        filling = slice(used.stop, rows * tiles[which])
        row = slots[first:stop] // selected.shape[2]
        token, head = row // 2, which // blocks * 2 + row % 2
        for mine, theirs in (
            (packed.q, q),
            (packed.dout, dout),
            (packed.lse, stats[..., 0]),
            (packed.delta, stats[..., 1]),
        ):
            assert torch.equal(mine[used], theirs[token, head])
        assert filling.stop - filling.start < rows
        assert not any(x[filling].any() for x in (packed.q, packed.dout, packed.delta))
        assert packed.lse[filling].isposinf().all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options", "own", "keys"),
    [
        (4, 2, {"block_size": 256, "topk": 3}, True, 128),  # work ranges by heads
        (2, 1, {"block_size": 256, "topk": 3}, False, 128),  # by queries
        (2, 1, {"block_size": 512, "topk": 2}, False, 16),  # 32 tiles of keys
    ],
)
def test_launches_of_one_pass_add_up(
    heads: int, kv_heads: int, options: dict[str, Any], own: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows, their positions, the order of sums; the two kernels' arithmetic is PyTorch's here."""
    shape = replace(tile_shapes(64, 4096), dkdv=TileShape(64, keys, 8, 3))
    monkeypatch.setattr(call, "tile_shapes", lambda d, b, *_: shape)
    one_pass_model.use(monkeypatch, own=own)
    monkeypatch.setattr(blocks_256_to_4096_gradients, "_SHORT_SPLIT", 128)
    lengths = [600, 1, 70]
    q, k, v, dout = tensors = inputs(lengths, heads, kv_heads, 64, torch.float32, "cpu")
    layout, ours = layout_of(lengths, "cpu"), build("triton", 64, **options)
    selection = ours.select(q, ours.summarize(k, layout), layout)
    out, lse, *want = exact(tensors, layout, selection[0], options["block_size"], ours.scale)
    got = ours.attend_backward(BackwardState(dout, q, k, v, out.float(), lse.float()), layout, selection)
    assert_results(got, want)
