"""A Triton kernel for the probabilities of compressed blocks, summed over the query heads of a group.

The scores of the group's heads stay in registers; only their sum is written, a G-th of what plain PyTorch passes
through memory several times.

Sizes: K key/value heads, G query heads of each, D head width; a tile has M queries and N compressed blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.blocks.available import triton_runs_on
from moba_train.attention.blocks.triton.softmax import LOG2_E
from moba_train.attention.blocks.triton.tiles import TileShape

TILE = TileShape(rows=64, keys=128, warps=8, stages=2)


def able(q_tHD: Tensor) -> bool:
    """Whether the kernel takes queries like these."""
    half = q_tHD.dtype in (torch.float16, torch.bfloat16) or not q_tHD.is_cuda  # the interpreter takes float32 too
    return q_tHD.shape[-1] in (64, 128) and q_tHD.dtype != torch.float64 and half and triton_runs_on(q_tHD)


def group_probabilities(
    q_tHD: Tensor, k_NKD: Tensor, lse_Ht: Tensor, first_t: Tensor, end_t: Tensor, scale: float
) -> Tensor:
    """float32 [K, t, N]: exp(scale q . k - lse), summed over the query heads of a group.

    Zero for blocks that a query does not see: ids before `first_t` and from `end_t` on.
    """
    tokens, heads, head_dim = q_tHD.shape
    blocks, kv_heads, _ = k_NKD.shape
    out_KtN = torch.empty(kv_heads, tokens, blocks, dtype=torch.float32, device=q_tHD.device)
    if out_KtN.numel() == 0:
        return out_KtN
    grid = (triton.cdiv(tokens, TILE.rows), triton.cdiv(blocks, TILE.keys), kv_heads)
    _probabilities[grid](
        q_tHD.contiguous(),
        k_NKD.contiguous(),
        lse_Ht.contiguous(),
        first_t.int(),
        end_t.int(),
        out_KtN,
        tokens,
        blocks,
        kv_heads,
        scale * LOG2_E.value,
        G=heads // kv_heads,
        D=head_dim,
        M=TILE.rows,
        N=TILE.keys,
        num_warps=TILE.warps,
        num_stages=TILE.stages,
    )
    return out_KtN


@triton.jit(do_not_specialize=["tokens", "blocks", "kv_heads"])
def _probabilities(
    q,
    k,
    lse,
    first,
    end,
    sums,
    tokens,
    blocks,
    kv_heads,
    scale_log2,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    row = tl.program_id(0) * M + tl.arange(0, M)
    block = tl.program_id(1) * N + tl.arange(0, N)
    kv_head = tl.program_id(2)
    column = tl.arange(0, D)
    ok_M = row < tokens
    first_M = tl.load(first + row, mask=ok_M, other=0)
    end_M = tl.load(end + row, mask=ok_M, other=0)
    sum_MN = tl.zeros([M, N], tl.float32)
    if tl.max(end_M, 0) > tl.program_id(1) * N:  # else the tile is behind all queries
        k_at = (block.to(tl.int64) * kv_heads + kv_head)[:, None] * D + column[None, :]
        k_ND = tl.load(k + k_at, mask=(block < blocks)[:, None], other=0.0)
        for g in range(G):
            head = kv_head * G + g
            q_at = (row.to(tl.int64) * (kv_heads * G) + head)[:, None] * D + column[None, :]
            q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)
            lse_M = tl.load(lse + head.to(tl.int64) * tokens + row, mask=ok_M, other=0.0)
            score_MN = tl.dot(q_MD, k_ND.T) * scale_log2
            sum_MN += tl.math.exp2(score_MN - lse_M[:, None] * LOG2_E)
    seen_MN = (first_M[:, None] <= block[None, :]) & (block[None, :] < end_M[:, None])
    sum_MN = tl.where(seen_MN, sum_MN, 0.0)  # what is not seen may have overflowed
    at = (kv_head.to(tl.int64) * tokens + row)[:, None] * blocks + block[None, :]
    tl.store(sums + at, sum_MN, mask=ok_M[:, None] & (block < blocks)[None, :])
