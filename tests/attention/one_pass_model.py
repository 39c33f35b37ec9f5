"""What the one-pass kernels compute, in PyTorch: Gluon has no interpreter, and the launches around them can be tested
with these in their place. Arguments are the kernels' own."""

from typing import Any

import torch
from torch import Tensor

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.hopper import blocks_256_to_4096_gradients


class Launcher:
    """A function in place of a kernel: `launcher[grid](...)`."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.function(grid, **arguments)


def _gradients(
    q: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of rows and a tile of keys; lse in units of log 2."""
    p = torch.exp2(q @ k.T * (scale * 1.4426950408889634) - lse[:, None])
    if visible is not None:
        p = p * visible
    ds = p * (dout @ v.T - delta[:, None])
    return ds @ k * scale, ds.T @ q * scale, p.T @ dout


def _keys(descriptor: Any, first: int, stop: int, head: int) -> Tensor:
    return descriptor.base[first:stop, head].float()


def backward_history(
    grid, q_desc, dout_desc, lse_desc, delta_desc, k_desc, v_desc, packed_dq, done, part_dk, part_dv, list_of_split,
    first_split, last_tile, bounds, lists, blocks, first_kv_head, key_tiles, split, scale, *, D, M, N, **_sizes,
):  # fmt: skip
    q, dout, lse, delta = (x.base for x in (q_desc, dout_desc, lse_desc, delta_desc))
    part_dk, part_dv = (x.view(-1, key_tiles, N, D) for x in (part_dk, part_dv))
    assert grid == (len(part_dk) * key_tiles,)
    for program in range(grid[0]):
        pid, key_tile = divmod(program, key_tiles)
        which = int(list_of_split[pid])
        if which >= lists:
            continue
        part, block = divmod(which, blocks)
        first = (int(last_tile[which - 1]) if which else 0) + (pid - int(first_split[which])) * split
        last = min(first + split, int(last_tile[which]))
        assert (done[first:last] == key_tile).all()
        rows = slice(first * M, last * M)
        start = int(bounds[block, 3]) + key_tile * N
        k, v = (_keys(x, start, start + N, first_kv_head + part) for x in (k_desc, v_desc))
        dq, part_dk[pid, key_tile], part_dv[pid, key_tile] = _gradients(
            q[rows].float(), dout[rows].float(), lse[rows], delta[rows], k, v, scale
        )
        packed_dq[rows] = dq if key_tile == 0 else packed_dq[rows] + dq
        done[first:last] += 1


def backward_diagonal(
    grid, q_desc, dout_desc, stats, k_desc, v_desc, dq, sum_dk, sum_dv, bounds, heads, key_tiles, scale, *, G, N,
    **_sizes,
):  # fmt: skip
    assert grid[1] * G == heads
    for block in range(grid[0]):
        first_row, last_row, shift, start, stop, key_shift = bounds[block].tolist()
        assert stop - start <= key_tiles * N
        seen = torch.arange(start, stop) + key_shift <= torch.arange(first_row, last_row)[:, None] + shift
        for kv_head in range(grid[1]):
            k, v = (_keys(x, start, stop, kv_head) for x in (k_desc, v_desc))
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for head in range(kv_head * G, kv_head * G + G):
                rows = slice(first_row, last_row), head
                q, dout = (x.base[rows].float() for x in (q_desc, dout_desc))
                lse, delta = stats[rows].unbind(-1)
                dq[rows], more_dk, more_dv = _gradients(q, dout, lse, delta, k, v, scale, seen)
                dk, dv = dk + more_dk, dv + more_dv
            sum_dk[start:stop, kv_head], sum_dv[start:stop, kv_head] = dk, dv


def use(monkeypatch: Any, *, own: bool) -> None:
    """Long blocks take one pass, with the functions here in place of its kernels; `own`: for the own blocks, too."""
    monkeypatch.setattr(blocks_256_to_4096_gradients, "backward_history", Launcher(backward_history))
    monkeypatch.setattr(blocks_256_to_4096_gradients, "backward_diagonal", Launcher(backward_diagonal))
    monkeypatch.setattr(blocks_256_to_4096_gradients.OnePass, "diagonal_in_one_pass", lambda self: own)
    monkeypatch.setattr(BlockCall, "backward_pass", "hopper/blocks_256_to_4096_gradients.py")
