"""Triton kernels for the scores of blocks (scores.py): the matrix of all queries by all windows never exists.

`_log_sum_exp` finds the normaliser of every query and head. `_block_scores` has a tile of queries and a tile of blocks
of one key/value head, and for every offset at which a window may overlap a block one tile of windows: the probabilities
of the group's heads are summed, and the largest sum stays. A window that overlaps two blocks is computed for both, in
the same order of operations, so that their scores tie as they should.

Sizes: K key/value heads, G query heads of each, D head width; a tile has M queries and N windows or blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.softmax import LOG2_E, LOWEST
from moba_train.attention.kernels.common.tiles import TileShape
from moba_train.attention.kernels.table import triton_runs_on

NORMALISER = TileShape(rows=128, keys=64, warps=4, stages=3)
SCORES = TileShape(rows=64, keys=64, warps=4, stages=2)


def able(q_THD: Tensor) -> bool:
    """True if the kernels take queries of this shape, dtype and device."""
    half = q_THD.dtype in (torch.float16, torch.bfloat16) or not q_THD.is_cuda  # the interpreter takes float32 too
    return q_THD.shape[-1] in (64, 128) and q_THD.dtype != torch.float64 and half and triton_runs_on(q_THD)


def log_sum_exp(q_THD: Tensor, windows_UKD: Tensor, first_T: Tensor, end_T: Tensor, scale: float) -> Tensor:
    """float32 [H, T], in units of log 2: of each query's scaled scores of the windows from `first_T` up to, but not
    including, `end_T` (int32 [T]); -inf for queries without any."""
    tokens, heads, head_dim = q_THD.shape
    units, kv_heads, _ = windows_UKD.shape
    lse_HT = torch.empty(heads, tokens, dtype=torch.float32, device=q_THD.device)
    if tokens:
        _log_sum_exp[(triton.cdiv(tokens, NORMALISER.rows), heads)](
            q_THD,
            windows_UKD,
            lse_HT,
            first_T,
            end_T,
            tokens,
            units,
            kv_heads,
            scale * LOG2_E.value,
            **_sizes(NORMALISER, heads // kv_heads, head_dim),
        )
    return lse_HT


def block_scores(
    q_THD: Tensor,
    windows_UKD: Tensor,
    lse_HT: Tensor,
    first_T: Tensor,
    end_T: Tensor,
    first_unit_N: Tensor,
    rows: slice,
    *,
    before: int,
    overlapping: int,
    scale: float,
) -> Tensor:
    """float32 [K, t, N]: the score of these blocks for the queries `rows`, from all queries' `log_sum_exp`.

    A block's windows are the `overlapping` ones from `before` units before its first unit (int32 [N]) on.
    """
    tokens, heads, head_dim = q_THD.shape
    units, kv_heads, _ = windows_UKD.shape
    blocks = first_unit_N.numel()
    queries = rows.stop - rows.start
    scores_KtN = torch.empty(kv_heads, queries, blocks, dtype=torch.float32, device=q_THD.device)
    if scores_KtN.numel():
        _block_scores[(triton.cdiv(blocks, SCORES.keys), triton.cdiv(queries, SCORES.rows), kv_heads)](
            q_THD,
            windows_UKD,
            lse_HT,
            first_T,
            end_T,
            first_unit_N,
            scores_KtN,
            tokens,
            units,
            blocks,
            rows.start,
            rows.stop,
            kv_heads,
            before,
            overlapping,
            scale * LOG2_E.value,
            TOGETHER=together(heads // kv_heads),
            **_sizes(SCORES, heads // kv_heads, head_dim),
        )
    return scores_KtN


def together(group: int) -> int:
    """Query heads whose queries are on their way to a program at the same time: all of a small group.

    Each has a tile of shared memory. With all of 8 heads of 128, the shared memory of a multiprocessor holds one
    program instead of four (0.96 ms instead of 0.52 at 32K tokens); with all of 16, it holds none.
    """
    # Up to 4 are faster together: 32 heads of 128 on 8 key/value heads take 0.46 ms, one by one 0.61 (H200, 32K tokens;
    # benchmarks/LOG.md, Selection and lists).
    return group if group <= 4 else 1


def _sizes(shape: TileShape, group: int, head_dim: int) -> dict[str, int]:
    tile = {"M": shape.rows, "N": shape.keys, "num_warps": shape.warps, "num_stages": shape.stages}
    return {"G": group, "D": head_dim, **tile}


@triton.jit
def _load_windows(windows, unit_N, units, kv_heads, kv_head, D: tl.constexpr):
    """Mean keys [N, D]; zeros for windows that do not exist."""
    at_N = (unit_N.to(tl.int64) * kv_heads + kv_head) * D
    ok_N = (unit_N >= 0) & (unit_N < units)
    return tl.load(windows + at_N[:, None] + tl.arange(0, D)[None, :], mask=ok_N[:, None], other=0.0)


# Counts that change from batch to batch; see attention/kernels/triton/__init__.py.
@triton.jit(do_not_specialize=["tokens", "units", "kv_heads"])
def _log_sum_exp(
    q,
    windows,
    lse,
    first,
    end,
    tokens,
    units,
    kv_heads,
    scale_log2,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the last queries see the most windows
    row_M = tile * M + tl.arange(0, M)
    ok_M = row_M < tokens
    first_M = tl.load(first + row_M, mask=ok_M, other=units)
    end_M = tl.load(end + row_M, mask=ok_M, other=0)
    q_at = (row_M.to(tl.int64) * tl.num_programs(1) + head) * D
    q_MD = tl.load(q + q_at[:, None] + tl.arange(0, D)[None, :], mask=ok_M[:, None], other=0.0)
    top_M = tl.full([M], LOWEST, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    for at in tl.range(tl.min(first_M), tl.max(end_M), N):
        unit_N = at + tl.arange(0, N)
        s = tl.dot(q_MD, _load_windows(windows, unit_N, units, kv_heads, head // G, D).T) * scale_log2
        seen = (unit_N[None, :] >= first_M[:, None]) & (unit_N[None, :] < end_M[:, None])
        s = tl.where(seen, s, float("-inf"))
        new_M = tl.maximum(top_M, tl.max(s, 1))
        sum_M = sum_M * tl.math.exp2(top_M - new_M) + tl.sum(tl.math.exp2(s - new_M[:, None]), 1)
        top_M = new_M
    # The log of 0 is not asked for: a query that sees no window gets -inf.
    lse_M = tl.where(sum_M > 0, top_M + tl.math.log2(sum_M), float("-inf"))
    tl.store(lse + head.to(tl.int64) * tokens + row_M, lse_M, mask=ok_M)


@triton.jit(do_not_specialize=["tokens", "units", "blocks", "start", "stop", "kv_heads", "before"])
def _block_scores(
    q,
    windows,
    lse,
    first,
    end,
    first_unit,
    scores,
    tokens,
    units,
    blocks,
    start,
    stop,
    kv_heads,
    before,
    overlapping,
    scale_log2,
    TOGETHER: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    block_N = tl.program_id(0) * N + tl.arange(0, N)
    row_M = start + tl.program_id(1) * M + tl.arange(0, M)
    kv_head = tl.program_id(2)
    column = tl.arange(0, D)
    ok_M = row_M < stop
    first_M = tl.load(first + row_M, mask=ok_M, other=units)
    end_M = tl.load(end + row_M, mask=ok_M, other=0)
    first_unit_N = tl.load(first_unit + block_N, mask=block_N < blocks, other=units) - before
    best_MN = tl.zeros([M, N], tl.float32)
    if tl.min(first_unit_N) < tl.max(end_M):  # else the tile is behind all queries
        for offset in tl.range(0, overlapping):
            unit_N = first_unit_N + offset
            k_ND = _load_windows(windows, unit_N, units, kv_heads, kv_head, D)
            sum_MN = tl.zeros([M, N], tl.float32)
            for first_head in tl.range(0, G, TOGETHER):
                for g in tl.static_range(TOGETHER):
                    head = kv_head * G + first_head + g
                    q_at = (row_M.to(tl.int64) * (kv_heads * G) + head)[:, None] * D + column[None, :]
                    q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)
                    lse_M = tl.load(lse + head.to(tl.int64) * tokens + row_M, mask=ok_M, other=0.0)
                    sum_MN += tl.math.exp2(tl.dot(q_MD, k_ND.T) * scale_log2 - lse_M[:, None])
            seen = (unit_N[None, :] >= first_M[:, None]) & (unit_N[None, :] < end_M[:, None])
            best_MN = tl.maximum(best_MN, tl.where(seen, sum_MN, 0.0))  # what is not seen may have overflowed
    at = (kv_head.to(tl.int64) * (stop - start) + row_M - start)[:, None] * blocks + block_N[None, :]
    tl.store(scores + at, best_MN, mask=ok_M[:, None] & (block_N < blocks)[None, :])
