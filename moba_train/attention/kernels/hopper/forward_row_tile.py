"""A tile of rows and the keys that it attends to, on Hopper: what each of two warpgroups does with half of the rows.

Written in Gluon, in which warps can have roles; others gather the rows and copy the keys (forward_pass.py). The scores
of a tile of keys are computed while the values of the tile before are added, the scores of a tile of rows' first keys
while the last values of the tile of rows before are; and while one warpgroup computes exponentials, the products of the
other keep the matrix units busy.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moba_train.attention.kernels.common.softmax import LN_2


@gluon.jit
def _scores(q_tile, k_room, step):
    """The product of rows and keys, under way."""
    M: gl.constexpr = q_tile.type.shape[0]
    N: gl.constexpr = k_room.type.shape[1]
    stages: gl.constexpr = k_room.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    nothing = gl.zeros([M, N], gl.float32, layout)
    keys = k_room.index(step % stages).permute([1, 0])
    return warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)


@gluon.jit
def _probabilities(s, top_M, seen_M, scale_log2, MASK: gl.constexpr):
    """(exp2 of the scores less the top [M, N], top [M] in units of log 2) after one more tile; MASK: of seen_M keys."""
    if MASK:
        key_N = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
        s = gl.where(key_N[None, :] < seen_M[:, None], s, float("-inf"))
    top_M = gl.maximum(top_M, gl.max(s, 1) * scale_log2)
    return gl.exp2(s * scale_log2 - top_M[:, None]), top_M


@gluon.jit
def _add_values(weights, total, q_tile, top_M, seen_M, room, bars, step, exists, scale_log2, MASK: gl.constexpr):
    """(total with the values of the tile of keys before `step`; probabilities and top of the tile `step`, if it
    exists), computed at the same time."""
    _q_room, _place_room, _seen_room, _many_room, k_room, v_room = room
    _q_bars, k_bars, v_bars = bars
    k_ready, k_free = k_bars
    v_ready, v_free = v_bars
    k_stages: gl.constexpr = k_room.type.shape[0]
    v_stages: gl.constexpr = v_room.type.shape[0]
    stage, v_stage, v_phase = step % k_stages, (step - 1) % v_stages, (step - 1) // v_stages & 1
    mbarrier.wait(k_ready.index(stage), step // k_stages & 1, pred=exists)
    score_token = _scores(q_tile, k_room, step)
    mbarrier.wait(v_ready.index(v_stage), v_phase)
    token = warpgroup_mma(weights, v_room.index(v_stage), total, is_async=True)
    s = warpgroup_mma_wait(1, deps=[score_token])
    p, top_M = _probabilities(s, top_M, seen_M, scale_log2, MASK)
    sum_M = gl.sum(p, 1)
    # ptxas moves the wait for a product up, before the exponentials, but not past a wait for a barrier.
    mbarrier.wait(v_ready.index(v_stage), v_phase)
    total = warpgroup_mma_wait(0, deps=[token])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(stage), pred=exists)
    mbarrier.arrive(v_free.index(v_stage))
    return total, p, top_M, sum_M


@gluon.jit
def _add_keys(state, q_tile, seen_M, room, bars, step, scale_log2, MASK: gl.constexpr):
    """(probabilities of the newest tile of keys, total of those before, top, sum) after one more tile, `step`."""
    weights, total, before_M, sum_M = state
    total, p, top_M, more_M = _add_values(
        weights, total, q_tile, before_M, seen_M, room, bars, step, True, scale_log2, MASK
    )
    shrink_M = gl.exp2(before_M - top_M)
    total = total * gl.convert_layout(shrink_M, gl.SliceLayout(1, total.type.layout))[:, None]
    return gl.convert_layout(p.to(q_tile.dtype), weights.type.layout), total, top_M, sum_M * shrink_M + more_M


@gluon.jit
def _seen(room, at, layout: gl.constexpr, N: gl.constexpr, OWN: gl.constexpr):
    """(tiles of keys of a place's rows, how many keys each row sees, how many tiles of keys all rows see whole).

    Not OWN: rows see all keys.
    """
    _q_room, _place_room, seen_room, many_room, _k_room, _v_room = room
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    many = gl.max(many_room.index(at).load(one), 0)
    if OWN:
        seen_M = seen_room.index(at).load(layout)
        return many, seen_M, gl.max(seen_room.index(at).slice(0, 1).load(one), 0) // N
    else:
        return many, gl.full([seen_room.type.shape[1]], 0, gl.int32, layout), many


@gluon.jit
def _store(out, lse, q_tile, place_room, total, top_M, sum_M, heads, tokens, OWN: gl.constexpr):
    """The results of a tile of rows, whose q is not needed any more."""
    layout: gl.constexpr = total.type.layout
    D: gl.constexpr = total.shape[1]
    whole_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    place_M = place_room.load(top_M.type.layout)
    ok = place_M >= 0
    if OWN:
        place_M = place_M % heads * tokens + place_M // heads
    gl.store(lse + place_M, (top_M + gl.log2(sum_M)) * LN_2, mask=ok)
    # Whole rows at once: stored as the product leaves them, 4 bytes a thread, they would take longer.
    q_tile.store((total * gl.convert_layout(1.0 / sum_M, gl.SliceLayout(1, layout))[:, None]).to(q_tile.dtype))
    gl.thread_barrier()
    place_M = place_room.load(gl.SliceLayout(1, whole_rows))
    at = out + (place_M.to(gl.int64) * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, whole_rows))[None, :]
    gl.store(at, q_tile.load(whole_rows), mask=(place_M >= 0)[:, None])
    gl.thread_barrier()


@gluon.jit
def attend_rows(
    out, lse, room, bars, half: gl.constexpr, heads, tokens, scale_log2, BLOCK: gl.constexpr, OWN: gl.constexpr
):  # fmt: skip
    """One warpgroup: the results of half of the rows of one tile after the other."""
    q_room, place_room, _seen_room, _many_room, k_room, _v_room = room
    q_bars, k_bars, _v_bars = bars
    q_ready, q_free = q_bars
    k_ready, k_free = k_bars
    places: gl.constexpr = q_room.type.shape[0]
    M: gl.constexpr = q_room.type.shape[1]
    D: gl.constexpr = q_room.type.shape[2]
    N: gl.constexpr = k_room.type.shape[1]
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, score)
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    no_top = gl.full([M], float("-inf"), gl.float32, rows)
    mbarrier.wait(q_ready.index(half), 0)
    many, seen_M, clear = _seen(room, half, rows, N, OWN)
    mbarrier.wait(k_ready.index(0), 0, pred=many > 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q_room.index(half), k_room, 0)])
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), pred=many > 0)
    p, top_M = _probabilities(s, no_top, seen_M, scale_log2, OWN)
    sum_M = gl.sum(p, 1)
    turn, step = half, 0
    while many > 0:
        at, following = turn % places, (turn + 2) % places
        q_tile = q_room.index(at)
        weights = gl.convert_layout(p.to(q_tile.dtype), left)
        steps = many if OWN else BLOCK // N
        state = (weights, gl.zeros([M, D], gl.float32, result), top_M, sum_M)
        for j in range(1, gl.minimum(steps, clear) if OWN else steps):
            state = _add_keys(state, q_tile, seen_M, room, bars, step + j, scale_log2, False)
        if OWN:
            for j in range(gl.maximum(clear, 1), steps):
                state = _add_keys(state, q_tile, seen_M - j * N, room, bars, step + j, scale_log2, True)
        weights, total, done_top_M, done_sum_M = state
        step += steps
        mbarrier.wait(q_ready.index(following), (turn + 2) // places & 1)
        many, seen_M, clear = _seen(room, following, rows, N, OWN)
        total, p, top_M, sum_M = _add_values(
            weights, total, q_room.index(following), no_top, seen_M, room, bars, step, many > 0, scale_log2, OWN
        )
        _store(out, lse, q_tile, place_room.index(at), total, done_top_M, done_sum_M, heads, tokens, OWN)
        mbarrier.arrive(q_free.index(at))
        turn += 2
