"""The best blocks of every query, found chunk by chunk: exact, whatever the scores, for up to 128 blocks.

A tile of queries walks the blocks in chunks and keeps, in registers, the C best so far in slots. A slot is an int64
that orders by score, then by lower block id; so all are distinct, and of equal scores the lower block id wins. What
enters is put in its place one by one: few do, once the first chunks have filled the slots.

Shape suffixes: M queries of a tile, N blocks of a chunk, S slots (C or more, a power of 2).
"""

import triton
import triton.language as tl

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
def no_blocks(M: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr):
    """(slots [M, S], their least [M], the score that enters them [M]) before the first chunk."""
    slot = tl.arange(0, SLOTS)
    empty = slot.to(tl.int64) - 0x7FFFFFFFFFFFFF00  # distinct, and below every score
    # Slots that are not used are full from the start, so that nothing ever enters them.
    best_MS = tl.where(slot < C, empty, 0x7FFFFFFFFFFFFF00 + slot.to(tl.int64))[None, :] + tl.zeros(
        [M, SLOTS], tl.int64
    )
    return best_MS, tl.min(best_MS, 1), tl.full([M], float("-inf"), tl.float32)


@triton.jit
def enter(score_MN, block_N, best_MS, worst_M, bar_M):
    """`no_blocks`' three after one more chunk. Scores are not NaN; -inf is no candidate."""
    top_M = tl.max(score_MN, 1)
    more = tl.max(((top_M >= bar_M) & (top_M > float("-inf"))).to(tl.int32), 0)
    while more > 0:
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
def found_ids(best_MS, C: tl.constexpr, SLOTS: tl.constexpr):
    """The blocks in the slots, int32 [M, S]; 0x7FFFFFFF for none."""
    taken = (best_MS > _NOT_TAKEN) & (tl.arange(0, SLOTS) < C)[None, :]
    return tl.where(taken, 0x7FFFFFFF - (best_MS & 0x7FFFFFFF).to(tl.int32), 0x7FFFFFFF)


@triton.jit
def store_ids(
    selected, id_MS, token, ok, tokens, head, GROUP: tl.constexpr, G: tl.constexpr, C: tl.constexpr, SLOTS: tl.constexpr
):
    """To selected [heads, T, C], ascending, -1 behind; an absent id is 0x7FFFFFFF. GROUP: for all heads of a group."""
    slot = tl.arange(0, SLOTS)
    id_MS = tl.sort(id_MS, 1)
    id_MS = tl.where(id_MS == 0x7FFFFFFF, -1, id_MS)
    place = token.to(tl.int64)[:, None] * C + slot[None, :]
    mask = ok[:, None] & (slot < C)[None, :]
    if GROUP:
        for g in range(0, G):
            tl.store(selected + (head * G + g).to(tl.int64) * tokens * C + place, id_MS, mask=mask)
    else:
        tl.store(selected + head.to(tl.int64) * tokens * C + place, id_MS, mask=mask)
