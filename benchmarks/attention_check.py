"""A sample of MoBA's selections, outputs and gradients against float64; outputs and gradients are those that follow
from the selection that was made."""

import bisect
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_rows import Row
from moba_train.attention.kernels.common.geometry import first_blocks
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.protocol import Selection

LIMITS = {"selection": 1e-3, "out": 1e-2, "lse": 1e-3, "dq": 2e-2, "dk": 2e-2, "dv": 2e-2}
"""Largest error allowed: relative in norm, but absolute for lse and for the gates of the selection."""
ENOUGH = 16
"""With fewer keys, gradients of the scores may cancel to zero, and relative errors mean nothing."""


def errors(row: Row, result: tuple[Tensor, Tensor, Selection, Tensor, Tensor, Tensor]) -> dict[str, float]:
    """The largest error of each name in LIMITS in the result of `row.both()`.

    `selection` is the largest gate of a block left out minus the smallest gate of a selected block, or 0 if negative;
    it is infinite for a wrong number of blocks and for blocks that are no candidates.
    """
    worst = dict.fromkeys(LIMITS, 0.0)
    sample = _Sample(row, result)
    generator = torch.Generator().manual_seed(1)
    tokens = [0, *torch.randint(row.tokens, (24,), generator=generator).tolist(), row.tokens - 1]
    heads = row.case.heads
    found = [sample.query(head, token) for head in sorted({0, 13 % heads, heads - 1}) for token in tokens]
    long = [b for b in range(len(sample.starts) - 1) if sample.starts[b + 1] - sample.starts[b] >= ENOUGH]
    found += [sample.block(long[i]) for i in {0, len(long) // 3, len(long) - 1} if long]
    for one in found:
        worst = {name: max(worst[name], one.get(name, 0.0)) for name in worst}
    return worst


def wrong(found: dict[str, float]) -> dict[str, float]:
    """The errors beyond their limits, NaN included."""
    return {name: error for name, error in found.items() if not error <= LIMITS[name]}


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


class _Sample:
    """Checks single queries and single blocks of a result."""

    def __init__(self, row: Row, result: Any) -> None:
        self.row = row
        self.out, self.lse, (self.selected, *_), self.dq, self.dk, self.dv = result
        layout = row.layout()
        self.means = pool_keys(row.k, layout, row.block_size).double()
        self.first_of = first_blocks(layout.cu_seqlens, row.block_size).tolist()
        self.edges = layout.cu_seqlens.tolist()
        self.starts = [
            start
            for edge, length in zip(self.edges, row.case.lengths(), strict=False)
            for start in range(edge, edge + length, row.block_size)
        ] + [row.tokens]

    def query(self, head: int, token: int) -> dict[str, float]:
        """Errors of one query's selection, output and gradient."""
        row = self.row
        own = bisect.bisect_right(self.starts, token) - 1
        first = self.first_of[bisect.bisect_right(self.edges, token) - 1]
        selected = [block for block in self.selected[head, token].tolist() if block >= 0]
        if len(set(selected)) != min(row.topk - 1, own - first) or any(not first <= block < own for block in selected):
            return {"selection": float("inf")}
        kv_head = head // (row.case.heads // row.case.kv_heads)
        q = row.q[token, head].double()
        dout = row.dout[token, head].double()
        found = {"selection": 0.0}
        if selected and len(selected) < own - first:
            gates = self.means[first:own, kv_head] @ q
            mine = torch.zeros_like(gates, dtype=torch.bool)
            mine[[block - first for block in selected]] = True
            found["selection"] = max(0.0, (gates[~mine].max() - gates[mine].min()).item())
        ranges = [(self.starts[block], self.starts[block + 1]) for block in selected] + [(self.starts[own], token + 1)]
        keys = torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(row.device)
        k = row.k[keys, kv_head].double()
        v = row.v[keys, kv_head].double()
        scale = row.attention.scale
        scores = k @ q * scale
        p = scores.softmax(0)
        want = p @ v
        found["out"] = _error(self.out[token, head], want)
        found["lse"] = (self.lse[head, token] - scores.logsumexp(0)).abs().item()
        if len(keys) >= ENOUGH:
            dscores = p * (v @ dout - want @ dout)
            found["dq"] = _error(self.dq[token, head], dscores @ k * scale)
        return found

    def block(self, block: int) -> dict[str, float]:
        """Errors of the gradients of some keys and values of one block, from all the queries that attend to it."""
        row = self.row
        group = row.case.heads // row.case.kv_heads
        kv_head = min(5, row.case.kv_heads - 1)
        start, stop = self.starts[block : block + 2]
        at_g, at_t = (self.selected[kv_head * group : (kv_head + 1) * group] == block).any(-1).nonzero(as_tuple=True)
        own_t = torch.arange(start, stop, device=row.device)
        at_t = torch.cat([at_t, own_t.repeat(group)])
        own_g = torch.arange(group, device=row.device).repeat_interleave(len(own_t))
        at_h = torch.cat([at_g, own_g]) + kv_head * group
        keys = own_t[:: max(1, len(own_t) // 5)]
        q = row.q[at_t, at_h].double()
        dout = row.dout[at_t, at_h].double()
        k = row.k[keys, kv_head].double()
        v = row.v[keys, kv_head].double()
        scale = row.attention.scale
        p = (q @ k.T * scale - self.lse[at_h, at_t].double()[:, None]).exp() * (keys <= at_t[:, None])
        delta = (self.out[at_t, at_h].double() * dout).sum(-1)
        dscores = p * (dout @ v.T - delta[:, None])
        return {
            "dv": _error(self.dv[keys, kv_head], p.T @ dout),
            "dk": _error(self.dk[keys, kv_head], dscores.T @ q * scale),
        }
