"""A Triton kernel for the choice of blocks: scores, sums over a group and the best blocks, all in registers.

A tile of queries walks the selection blocks in chunks. The compressed blocks that overlap with a selection block are
O neighbours of its own first one, each with its weight (selection.py), so the chunk's scores are a sum over offsets and
query heads of exp(q . k - lse), with one matrix product [M, D] x [D, N] for each: the keys of an offset are gathered by
their rows. That makes O / (block / stride) times the products that are needed, 5/4 with the paper's sizes, and nothing
passes through memory: not the probabilities, 1 GiB at 32K tokens, nor their sums.

Sizes: K key/value heads, G query heads of each, D head width, O offsets; a tile has M queries and N selection blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks
from moba_train.attention.kernels.common.softmax import LOG2_E
from moba_train.attention.kernels.common.tiles import TileShape
from moba_train.attention.kernels.table import TRITON, triton_runs_on
from moba_train.attention.kernels.triton.highest_scores import HIGHEST, enter, found_ids, no_blocks, store_ids


def able(q_nHD: Tensor, count: int) -> bool:
    """True if the kernel takes queries of this shape, dtype and device, and can choose `count` blocks for each."""
    half = q_nHD.dtype in (torch.float16, torch.bfloat16) or not q_nHD.is_cuda  # the interpreter takes float32 too
    possible = half and q_nHD.dtype != torch.float64 and triton_runs_on(q_nHD)
    return possible and not TRITON.size_problem(q_nHD.shape[-1], None, count)


def tile(count: int) -> TileShape:
    """The tile of a program that chooses `count` blocks: the slots of all its queries stay in registers."""
    return TileShape(rows=64, keys=32, warps=4 if count < 16 else 8, stages=2)


def choose(
    q_nHD: Tensor,
    k_NKD: Tensor,
    lse_Hn: Tensor,
    seen: tuple[Tensor, Tensor],
    queries: QueryBlocks,
    ids_OM: Tensor,
    weights_O: Tensor,
    scale: float,
    count: int,
    *,
    first: int,
    local: int,
) -> Tensor:
    """int32 [K, n, count]: `choose_blocks` of the scores of all selection blocks, ascending, -1 behind.

    `seen`: the first compressed block that each query sees, and one past the last; `ids_OM`, `weights_O`: the
    compressed blocks of every selection block by their offset, and the offsets' weights, float32.
    """
    tokens, heads, head_dim = q_nHD.shape
    many, kv_heads, _ = k_NKD.shape
    chosen_KnC = torch.empty(kv_heads, tokens, count, dtype=torch.int32, device=q_nHD.device)
    if chosen_KnC.numel() == 0:
        return chosen_KnC
    shape = tile(count)
    _choose[(triton.cdiv(tokens, shape.rows), kv_heads)](
        q_nHD.contiguous(),
        k_NKD.contiguous(),
        lse_Hn.contiguous(),
        *(x.int() for x in (*seen, *queries, ids_OM)),
        weights_O,
        chosen_KnC,
        tokens,
        many,
        ids_OM.shape[1],
        kv_heads,
        scale * LOG2_E.value,
        OFFSETS=len(ids_OM),
        FORCED_FIRST=first,
        FORCED_LOCAL=local,
        G=heads // kv_heads,
        C=count,
        SLOTS=max(2, triton.next_power_of_2(count)),
        D=head_dim,
        M=shape.rows,
        N=shape.keys,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return chosen_KnC


# Counts that change from batch to batch; see attention/kernels/triton/__init__.py.
@triton.jit(do_not_specialize=["tokens", "many", "blocks", "kv_heads"])
def _choose(
    q,
    k,
    lse,
    seen_from,
    seen_to,
    own,
    first,
    ids,
    weights,
    selected,
    tokens,
    many,
    blocks,
    kv_heads,
    scale_log2,
    OFFSETS: tl.constexpr,
    FORCED_FIRST: tl.constexpr,
    FORCED_LOCAL: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    SLOTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    # The last queries have the most candidates: they go first.
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    token = tile * M + tl.arange(0, M)
    ok = token < tokens
    own_M = tl.load(own + token, mask=ok, other=0)
    first_M = tl.load(first + token, mask=ok, other=0)
    from_M = tl.load(seen_from + token, mask=ok, other=0)
    to_M = tl.load(seen_to + token, mask=ok, other=0)
    column = tl.arange(0, D)
    q_MD = q + (token.to(tl.int64) * (kv_heads * G) + kv_head * G)[:, None] * D + column[None, :]
    lse_M = lse + (kv_head * G).to(tl.int64) * tokens + token

    best_MS, worst_M, bar_M = no_blocks(M, C, SLOTS)
    lo = tl.min(tl.where(ok, first_M, blocks))
    chunks = tl.maximum(tl.cdiv(tl.max(own_M) - lo, N), 0)
    for chunk in range(0, chunks):
        block = lo + (chunks - 1 - chunk) * N + tl.arange(0, N)
        score_MN = tl.zeros([M, N], tl.float32)
        for offset in range(OFFSETS):
            id_N = tl.load(ids + offset * blocks + block, mask=block < blocks, other=0x7FFFFFFF)
            k_at = (id_N.to(tl.int64) * kv_heads + kv_head)[:, None] * D + column[None, :]
            k_ND = tl.load(k + k_at, mask=(id_N < many)[:, None], other=0.0)
            sum_MN = tl.zeros([M, N], tl.float32)
            for g in range(G):
                s = tl.dot(tl.load(q_MD + g * D, mask=ok[:, None], other=0.0), k_ND.T)
                of_M = tl.load(lse_M + g * tokens, mask=ok, other=0.0)
                sum_MN += tl.math.exp2(s * scale_log2 - of_M[:, None] * LOG2_E)
            sees_MN = (from_M[:, None] <= id_N[None, :]) & (id_N[None, :] < to_M[:, None])
            # What is not seen may have overflowed.
            score_MN += tl.where(sees_MN, sum_MN, 0.0) * tl.load(weights + offset)
        # Infinity stands for forced blocks.
        score_MN = tl.minimum(score_MN, HIGHEST)
        forced_MN = (block[None, :] < first_M[:, None] + FORCED_FIRST) | (
            block[None, :] > own_M[:, None] - FORCED_LOCAL
        )
        score_MN = tl.where(forced_MN, float("inf"), score_MN)
        history_MN = (first_M[:, None] <= block[None, :]) & (block[None, :] < own_M[:, None])
        score_MN = tl.where(history_MN, score_MN, float("-inf"))
        best_MS, worst_M, bar_M = enter(score_MN, block, best_MS, worst_M, bar_M)
    store_ids(selected, found_ids(best_MS, C, SLOTS), token, ok, tokens, kv_head, False, G, C, SLOTS)
