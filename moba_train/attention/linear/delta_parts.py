"""The delta rule over many rows, part by part: each hands its last state on, and the backward pass repeats it.

Kernels of the delta rule make some thirty tensors of the size of q in the backward pass; of a part these are small
beside the layer's own.

Shape suffixes: n rows of a part, H query heads, d head width, N segments.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moba_train.attention.linear.delta_states import Edges

_ROWS = 8_192
"""Rows of a part of a wide layer. With kernels of 32 heads of 64, whose launches take the host longer than 4,096 rows
take an H200, parts of 4,096 took 24.3 ms for 8,192 tokens, where one call took 8.8."""
_CHANNELS = 2_048
"""The narrowest layer that is wide. Parts of a narrower one have more rows, and the same memory: its launches take the
host as long, and the GPU less."""
_CHUNK = 64
"""Rows that the kernels take at a time: parts are multiples of it, so that they cut no chunk in two."""

Rows = tuple[Tensor, ...]
"""Tensors [n, ...] with the same rows."""
Part = Callable[[Rows, Rows | None, Edges, Tensor | None, bool], tuple[Tensor, Tensor | None]]
"""Outputs [n, ...] and, if wanted, the states behind the segments [N, H, d, d] of a part, from its rows, those before
it, its edges, and the states before its segments."""


def most_rows(channels: int) -> int:
    """The most rows of a part of a layer whose queries have so many channels, all heads together."""
    return max(_ROWS, _ROWS * _CHANNELS // channels // _CHUNK * _CHUNK)


def in_parts(
    run: Part,
    rows: Rows,
    edges: Edges,
    initial_NHdd: Tensor | None = None,
    wants_states: bool = False,
    *,
    most: int,
    lookback: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """What `run` gives for all rows at once, computed for at most `most` of them at a time.

    A part is given the `lookback` rows before it, of which parts have at least as many: zeros for those that its
    document does not have, None if it has none of them.
    """
    bounds = edges[1].tolist()
    sizes = _part_sizes(bounds[-1], most)
    pieces = list(zip(*(x.split(sizes) for x in rows), strict=True))
    outputs: list[Tensor] = []
    behind: list[Tensor] = []
    state_1Hdd: Tensor | None = None
    start = 0
    for number, size in enumerate(sizes):
        stop = start + size
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)  # segments first to last - 1 meet it
        inner = (*(max(bound, start) - start for bound in bounds[first:last]), size)
        goes_on = bounds[last] > stop
        known = min(lookback, start - bounds[first])
        out, behind_NHdd = checkpoint(
            run,
            pieces[number],
            _rows_before(pieces[number - 1], known, lookback) if known else None,
            _edges(inner, edges[0].device),
            _states_before(initial_NHdd, state_1Hdd, first, last),
            goes_on or wants_states,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(out)
        state_1Hdd = behind_NHdd[-1:] if goes_on else None
        if wants_states:
            behind.append(behind_NHdd[:-1] if goes_on else behind_NHdd)
        start = stop
    return torch.cat(outputs), torch.cat(behind) if wants_states else None


def _part_sizes(total: int, most: int) -> list[int]:
    """Parts of nearly equal sizes."""
    parts = -(-total // most)
    size = -(-total // parts)
    if size >= _CHUNK:
        size = min(most, -(-size // _CHUNK) * _CHUNK)
    return [min(size, total - start) for start in range(0, total, size)]


@lru_cache(maxsize=64)
def _edges(bounds: tuple[int, ...], device: torch.device) -> Edges:
    """Equal parts share these tensors, by which fla-core knows what it has computed from them."""
    on_cpu = torch.tensor(bounds)
    return on_cpu.to(device, non_blocking=True), on_cpu


def _rows_before(rows: Rows, known: int, lookback: int) -> Rows:
    """The last `known` rows, behind zeros up to `lookback`."""
    return tuple(torch.cat([x.new_zeros((lookback - known, *x.shape[1:])), x[len(x) - known :]]) for x in rows)


def _states_before(initial_NHdd: Tensor | None, state_1Hdd: Tensor | None, first: int, last: int) -> Tensor | None:
    """The states before segments `first` to `last` - 1, the first of which may have begun in an earlier part."""
    if state_1Hdd is None:
        return None if initial_NHdd is None else initial_NHdd[first:last]
    others = last - first - 1
    rest = (
        state_1Hdd.new_zeros(others, *state_1Hdd.shape[1:]) if initial_NHdd is None else initial_NHdd[first + 1 : last]
    )
    return torch.cat([state_1Hdd, rest])
