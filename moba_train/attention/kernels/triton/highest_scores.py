"""The highest scores of every query: of given scores, in one pass over them; and of scores that come chunk by chunk.

`choose_blocks` (../common/selection.py): a program holds some rows of scores as sortable integers. The lowest one to be
chosen of a row is found bit by bit, by counting how many are at least as high: 32 counts, however many are wanted. A
prefix sum says where the ones above it go, and the first ones that equal it, so ids ascend without a sort.

`no_blocks`, `enter`, `found_ids` and `store_ids`, for kernels that make the scores: exact, whatever these are, for up
to 128 blocks. A tile of queries walks the blocks in chunks and keeps in registers the best so far. A kept block is an
int64 that orders by score, then by lower block id; so all are distinct, and of equal scores the lower block id wins. A
block that enters replaces the least one by one: few do, once the first chunks have filled the registers.

Shape suffixes: M queries of a tile, N blocks of a chunk, S kept blocks (HISTORY or more, a power of 2).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.table import triton_runs_on

_SCORES = 4096
"""Scores of a program: 32 for each thread."""
MOST = 2**15
"""Scores of a row at most."""


def able(scores_HtN: Tensor) -> bool:
    """True if the kernel takes scores like these."""
    return scores_HtN.dtype == torch.float32 and scores_HtN.shape[-1] <= MOST and triton_runs_on(scores_HtN)


def choose_blocks(
    scores_HtN: Tensor, own_t: Tensor, first_t: Tensor, history_blocks: int, *, first: int, local: int
) -> Tensor:
    """int32 [H, t, C] of `selection.choose_blocks`; C = `history_blocks` <= N."""
    heads, queries, blocks = scores_HtN.shape
    chosen_HtC = torch.empty(heads, queries, history_blocks, dtype=torch.int32, device=scores_HtN.device)
    if chosen_HtC.numel() == 0:
        return chosen_HtC
    width = max(16, triton.next_power_of_2(blocks))
    rows = max(1, _SCORES // width)
    _choose[(triton.cdiv(queries, rows), heads)](
        scores=scores_HtN.contiguous(),
        own=own_t.int(),
        first=first_t.int(),
        chosen=chosen_HtC,
        queries=queries,
        blocks=blocks,
        forced_first=first,
        forced_local=local,
        history_blocks=history_blocks,
        KEPT=triton.next_power_of_2(history_blocks),
        M=rows,
        N=width,
        # A row stays in registers as a whole: of 32,768 scores with 4 warps each thread would hold 256.
        num_warps=4 if width <= 4096 else 16,
    )
    return chosen_HtC


@triton.jit(do_not_specialize=["queries", "blocks", "forced_first", "forced_local", "history_blocks"])
def _choose(
    scores, own, first, chosen, queries, blocks, forced_first, forced_local, history_blocks,
    KEPT: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    LOWEST_KEY: tl.constexpr = -0x80000000
    query_M = tl.program_id(0) * M + tl.arange(0, M)
    ok_M = query_M < queries
    row_M = tl.program_id(1).to(tl.int64) * queries + query_M
    block_N = tl.arange(0, N)
    own_M1 = tl.load(own + query_M, mask=ok_M, other=0)[:, None]
    first_M1 = tl.load(first + query_M, mask=ok_M, other=0)[:, None]
    history = (block_N[None, :] >= first_M1) & (block_N[None, :] < own_M1)
    at_MN = row_M[:, None] * blocks + block_N[None, :]
    score = tl.load(scores + at_MN, mask=history & (block_N < blocks)[None, :], other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    # Negative floats order backwards as integers: their magnitude bits are inverted.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    forced = (block_N[None, :] < first_M1 + forced_first) | (block_N[None, :] > own_M1 - forced_local)
    key = tl.where(score == float("-inf"), LOWEST_KEY, key)
    key = tl.where(history & forced, 0x7FFFFFFF, key)

    # The highest number that `history_blocks` keys reach: its sign first, then bit by bit.
    reach_M = tl.sum((key >= 0).to(tl.int32), 1)
    bar_M = tl.where(reach_M >= history_blocks, 0, LOWEST_KEY)
    for bit in tl.range(0, 31):
        higher_M = bar_M + (1 << (30 - bit))
        reach_M = tl.sum((key >= higher_M[:, None]).to(tl.int32), 1)
        bar_M = tl.where(reach_M >= history_blocks, higher_M, bar_M)

    above = key > bar_M[:, None]
    equal = (key == bar_M[:, None]) & (key != LOWEST_KEY)
    missing_M = history_blocks - tl.sum(above.to(tl.int32), 1)
    taken = above | (equal & (tl.cumsum(equal.to(tl.int32), 1) <= missing_M[:, None]))
    position = tl.cumsum(taken.to(tl.int32), 1) - 1
    out_M1 = chosen + row_M[:, None] * history_blocks
    tl.store(out_M1 + position, tl.broadcast_to(block_N[None, :], (M, N)), mask=taken & ok_M[:, None])
    taken_M = tl.sum(taken.to(tl.int32), 1)
    kept_S = tl.arange(0, KEPT)
    unused = (kept_S[None, :] >= taken_M[:, None]) & (kept_S < history_blocks)[None, :] & ok_M[:, None]
    tl.store(out_M1 + kept_S[None, :], tl.full([M, KEPT], -1, tl.int32), mask=unused)


HIGHEST = tl.constexpr(3.4028234663852886e38)
"""The largest finite score: of a candidate that is not forced, whose score is infinity."""
_NOT_TAKEN = tl.constexpr(-0x7FFFFFFFFFFF0000)


@triton.jit
def _sortable(score, block):
    """int64 that orders by score, then by lower block id."""
    bits = score.to(tl.int32, bitcast=True)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (monotone.to(tl.int64) << 32) | (0x7FFFFFFF - block).to(tl.int64)


@triton.jit
def _score_of(key):
    monotone = (key >> 32).to(tl.int32)
    bits = monotone ^ ((monotone >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def no_blocks(M: tl.constexpr, HISTORY: tl.constexpr, KEPT: tl.constexpr):
    """(kept blocks [M, S], their least [M], the score that enters them [M]) before the first chunk."""
    kept = tl.arange(0, KEPT)
    # Distinct, so that replacing the least one replaces one alone.
    empty = kept.to(tl.int64) - 0x7FFFFFFFFFFFFF00  # distinct, and below every score
    # Registers that are not used are full from the start, so that nothing ever enters them.
    best_MS = tl.where(kept < HISTORY, empty, 0x7FFFFFFFFFFFFF00 + kept.to(tl.int64))[None, :] + tl.zeros(
        [M, KEPT], tl.int64
    )
    return best_MS, tl.min(best_MS, 1), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def enter(score_MN, block_N, best_MS, worst_M, bar_M):
    """`no_blocks`' three after one more chunk. Scores are not NaN; -inf is no candidate."""
    top_M = tl.max(score_MN, 1)
    more = tl.max(((top_M >= bar_M) & (top_M > float("-inf"))).to(tl.int32), 0)
    while more > 0:
        # Of equal scores the lowest id; ids order the kept ones as well.
        winner_M = tl.min(tl.where(score_MN == top_M[:, None], block_N[None, :], 0x7FFFFFFF), 1)
        key_M = _sortable(top_M, winner_M)
        enters_M = (key_M > worst_M) & (top_M > float("-inf"))
        best_MS = tl.where(enters_M[:, None] & (best_MS == worst_M[:, None]), key_M[:, None], best_MS)
        worst_M = tl.min(best_MS, 1)
        bar_M = tl.where(worst_M > _NOT_TAKEN, _score_of(worst_M), float("-inf"))
        # What did not enter is below the bar, and so is all the rest of its row in this chunk.
        score_MN = tl.where(block_N[None, :] == winner_M[:, None], float("-inf"), score_MN)
        score_MN = tl.where(enters_M[:, None], score_MN, float("-inf"))
        top_M = tl.max(score_MN, 1)
        more = tl.max(((top_M >= bar_M) & (top_M > float("-inf"))).to(tl.int32), 0)
    return best_MS, worst_M, bar_M


@triton.jit
def found_ids(best_MS, HISTORY: tl.constexpr, KEPT: tl.constexpr):
    """The kept blocks, int32 [M, S]; 0x7FFFFFFF for none."""
    taken = (best_MS > _NOT_TAKEN) & (tl.arange(0, KEPT) < HISTORY)[None, :]
    return tl.where(taken, 0x7FFFFFFF - (best_MS & 0x7FFFFFFF).to(tl.int32), 0x7FFFFFFF)


@triton.jit
def store_ids(
    selected, id_MS, token, ok, tokens, head,
    GROUP: tl.constexpr, G: tl.constexpr, HISTORY: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Store to selected [heads, T, HISTORY], ascending, -1 behind; an absent id is 0x7FFFFFFF. GROUP: for all heads of
    a group."""
    kept = tl.arange(0, KEPT)
    id_MS = tl.sort(id_MS, 1)
    id_MS = tl.where(id_MS == 0x7FFFFFFF, -1, id_MS)
    offset = token.to(tl.int64)[:, None] * HISTORY + kept[None, :]
    mask = ok[:, None] & (kept < HISTORY)[None, :]
    if GROUP:
        for g in range(0, G):
            tl.store(selected + (head * G + g).to(tl.int64) * tokens * HISTORY + offset, id_MS, mask=mask)
    else:
        tl.store(selected + head.to(tl.int64) * tokens * HISTORY + offset, id_MS, mask=mask)
