"""A Triton kernel for the target of `seer`: the largest probability between the queries and the keys of two blocks.

A program holds the queries of one block and head and walks the blocks up to its own; of each product of queries and
keys one number leaves the chip. At 32K tokens and 32 heads of 64 these are 2.2 TFLOP, and no exponential but one for
each pair of blocks.

Sizes: G query heads of a key/value head, D head width; a block fits into a tile of M queries or keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_edges
from moba_train.attention.kernels.common.softmax import LOG2_E
from moba_train.attention.layout import Layout
from moba_train.mechanisms.gates.grid import block_grid, query_rows

# A tile holds two whole blocks' scores in registers: 256 x 256 in float32 would be all registers of a multiprocessor.
_LONGEST = 128


def able(block_size: int) -> bool:
    """True if the kernel takes blocks of this size."""
    return block_size <= _LONGEST


def tile_rows(block_size: int) -> int:
    """Queries and keys of a tile."""
    # Triton multiplies at least 16 rows.
    return max(16, triton.next_power_of_2(block_size))


def block_maxima(
    q_nHd: Tensor, k_TKd: Tensor, lse_Hn: Tensor, layout: Layout, block_size: int, scale: float, every: int
) -> Tensor:
    """float32 [H, l, N]: the largest exp(scale q . k - lse) between the queries of each of the layout's rows of queries
    and the keys of each block that they see; 0 for other blocks."""
    rows = query_rows(layout, block_size, every)
    edges = block_edges(layout, block_size)
    heads = q_nHd.shape[1]
    # Zeros: blocks that a row does not see are not written.
    maxima_HlN = torch.zeros(heads, rows.bound, len(edges) - 1, dtype=torch.float32, device=q_nHd.device)
    if rows.count:
        _maxima[(rows.count, heads)](
            q_nHd.contiguous(),
            k_TKd.contiguous(),
            lse_Hn.float().contiguous(),
            rows.queries_lB.int(),
            torch.where(rows.present_lB, block_grid(layout, block_size).tokens_n[rows.queries_lB], -1).int(),
            rows.ids_l.int(),
            rows.first_l.int(),
            edges,
            maxima_HlN,
            len(q_nHd),
            rows.bound,
            len(edges) - 1,
            scale * LOG2_E.value,
            G=heads // k_TKd.shape[1],
            D=q_nHd.shape[2],
            BLOCK=block_size,
            M=tile_rows(block_size),
            num_warps=4,
            num_stages=3,
        )
    return maxima_HlN


# Counts that change from batch to batch; see attention/kernels/triton/__init__.py.
@triton.jit(do_not_specialize=["queries", "rows", "blocks"])
def _maxima(
    q,
    k,
    lse,
    row_of,
    token_of,
    own,
    first,
    edges,
    maxima,
    queries,
    rows,
    blocks,
    scale_log2,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
):
    """One row of blocks and one head; row_of, token_of [l, B]: row and token (-1: none) of each of its queries."""
    # The last rows see the most blocks: they go first.
    row, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(1)
    offset = tl.arange(0, M)
    column = tl.arange(0, D)
    token_M = tl.load(token_of + row * BLOCK + offset, mask=offset < BLOCK, other=-1)
    query_M = tl.load(row_of + row * BLOCK + offset, mask=offset < BLOCK, other=0).to(tl.int64)
    q_at = (query_M * heads + head) * D
    q_MD = tl.load(q + q_at[:, None] + column[None, :], mask=(token_M >= 0)[:, None], other=0.0)
    lse_M = tl.load(lse + head.to(tl.int64) * queries + query_M, mask=token_M >= 0, other=0.0) * LOG2_E
    result = maxima + (head.to(tl.int64) * rows + row) * blocks
    for block in tl.range(tl.load(first + row), tl.load(own + row) + 1):
        start, stop = tl.load(edges + block), tl.load(edges + block + 1)
        key = start + tl.arange(0, M)
        k_at = (key.to(tl.int64) * (heads // G) + head // G) * D
        k_MD = tl.load(k + k_at[:, None] + column[None, :], mask=(key < stop)[:, None], other=0.0)
        s = tl.dot(q_MD, k_MD.T) * scale_log2 - lse_M[:, None]
        s = tl.where(key[None, :] <= tl.minimum(token_M, stop - 1)[:, None], s, float("-inf"))
        # exp2 grows, so the largest score has the largest probability: one exponential for a pair of blocks.
        tl.store(result + block, tl.math.exp2(tl.max(tl.max(s, 1), 0)))
