"""The delta rule over many rows, part by part: each hands its last state on, and the backward pass repeats it.

Kernels of the delta rule keep and make some twenty tensors of the size of q; of a part these are small beside the
layer's own.

Shape suffixes: n rows, H query heads, d head width, N segments.
"""

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moba_train.attention.linear.delta_states import DeltaInputs, DeltaRule, Edges

ROWS = 32_768
"""Rows of a part. On an H200 parts of 4,096 took 24.3 ms for 8,192 tokens of 32 heads of 64, where one call takes 8.8:
the host needs longer than the GPU."""


def delta_in_parts(
    rule: DeltaRule,
    inputs: DeltaInputs,
    edges: Edges,
    initial_NHdd: Tensor | None,
    wants_states: bool,
    rows: int = ROWS,
) -> tuple[Tensor, Tensor | None]:
    """What `rule` gives for all rows at once: outputs [n, H, d] and, if wanted, the states behind the segments."""
    bounds = edges[1].tolist()
    total = bounds[-1]
    outputs: list[Tensor] = []
    behind: list[Tensor] = []
    state_1Hdd: Tensor | None = None
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)  # segments first to last - 1 meet it
        inner = torch.tensor([max(bound, start) - start for bound in bounds[first:last]] + [stop - start])
        on_device = inner.to(edges[0].device, non_blocking=True)
        before = _states_before(initial_NHdd, state_1Hdd, first, last)
        goes_on = bounds[last] > stop
        out_nHd, behind_NHdd = checkpoint(
            rule,
            inputs.rows([slice(start, stop)]),
            (on_device, inner),
            before,
            goes_on or wants_states,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        outputs.append(out_nHd)
        state_1Hdd = behind_NHdd[-1:] if goes_on else None
        if wants_states:
            behind.append(behind_NHdd[:-1] if goes_on else behind_NHdd)
    return torch.cat(outputs), torch.cat(behind) if wants_states else None


def _states_before(initial_NHdd: Tensor | None, state_1Hdd: Tensor | None, first: int, last: int) -> Tensor | None:
    """The states before segments `first` to `last` - 1, the first of which may have begun in an earlier part."""
    if state_1Hdd is None:
        return None if initial_NHdd is None else initial_NHdd[first:last]
    others = last - first - 1
    rest = (
        state_1Hdd.new_zeros(others, *state_1Hdd.shape[1:]) if initial_NHdd is None else initial_NHdd[first + 1 : last]
    )
    return torch.cat([state_1Hdd, rest])
