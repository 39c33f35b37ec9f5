"""A tile of rows and the keys that it attends to, on Hopper: the part of each of two consumer warpgroups, half of the
rows.

Producers gather the rows and copy the keys (blocks_from_512_forward.py). The scores of a tile of keys are computed
while the values of the tile before are added, the scores of a tile of rows' first keys while the last values of the
tile of rows before are; and while one warpgroup computes exponentials, the products of the other keep the matrix units
busy.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from moba_train.attention.kernels.common.softmax import LN_2
from moba_train.attention.kernels.hopper import thread_barrier


@gluon.jit
def _scores(q_tile, k_smem, step):
    """The product of rows and keys, under way."""
    M: gl.constexpr = q_tile.type.shape[0]
    N: gl.constexpr = k_smem.type.shape[1]
    stages: gl.constexpr = k_smem.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    nothing = gl.zeros([M, N], gl.float32, layout)
    keys = k_smem.index(step % stages).permute([1, 0])
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
def _add_values(weights, total, q_tile, top_M, seen_M, smem, barriers, step, exists, scale_log2, MASK: gl.constexpr):
    """(total with the values of the tile of keys before `step`; probabilities and top of the tile `step`, if it
    exists), computed at the same time."""
    _q_smem, _destination_smem, _seen_smem, _key_tiles_smem, k_smem, v_smem = smem
    _q_barriers, k_barriers, v_barriers = barriers
    k_full, k_empty = k_barriers
    v_full, v_empty = v_barriers
    k_stages: gl.constexpr = k_smem.type.shape[0]
    v_stages: gl.constexpr = v_smem.type.shape[0]
    stage, v_stage, v_phase = step % k_stages, (step - 1) % v_stages, (step - 1) // v_stages & 1
    # Without a next tile the product runs on what shared memory holds, and its result is not used.
    mbarrier.wait(k_full.index(stage), step // k_stages & 1, pred=exists)
    score_token = _scores(q_tile, k_smem, step)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    token = warpgroup_mma(weights, v_smem.index(v_stage), total, is_async=True)
    s = warpgroup_mma_wait(1, deps=[score_token])
    p, top_M = _probabilities(s, top_M, seen_M, scale_log2, MASK)
    sum_M = gl.sum(p, 1)
    # ptxas moves the wait for a product up, before the exponentials, but not past a wait for a barrier.
    mbarrier.wait(v_full.index(v_stage), v_phase)
    total = warpgroup_mma_wait(0, deps=[token])
    thread_barrier()
    mbarrier.arrive(k_empty.index(stage), pred=exists)
    mbarrier.arrive(v_empty.index(v_stage))
    return total, p, top_M, sum_M


@gluon.jit
def _add_keys(state, q_tile, seen_M, smem, barriers, step, scale_log2, MASK: gl.constexpr):
    """(probabilities of the newest tile of keys, total of those before, top, sum) after one more tile, `step`."""
    weights, total, before_M, sum_M = state
    total, p, top_M, more_M = _add_values(
        weights, total, q_tile, before_M, seen_M, smem, barriers, step, True, scale_log2, MASK
    )
    # Scaled here, where its product has ended: an accumulator in flight must not be read.
    shrink_M = gl.exp2(before_M - top_M)
    total = total * gl.convert_layout(shrink_M, gl.SliceLayout(1, total.type.layout))[:, None]
    return gl.convert_layout(p.to(q_tile.dtype), weights.type.layout), total, top_M, sum_M * shrink_M + more_M


@gluon.jit
def _seen(smem, stage, layout: gl.constexpr, N: gl.constexpr, DIAGONAL: gl.constexpr):
    """(tiles of keys of a stage's rows, number of keys that each row sees, number of tiles of keys that all rows see
    whole).

    Not DIAGONAL: rows see all keys.
    """
    _q_smem, _destination_smem, seen_smem, key_tiles_smem, _k_smem, _v_smem = smem
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    key_tiles = gl.max(key_tiles_smem.index(stage).load(one), 0)
    if DIAGONAL:
        seen_M = seen_smem.index(stage).load(layout)
        return key_tiles, seen_M, gl.max(seen_smem.index(stage).slice(0, 1).load(one), 0) // N
    else:
        return key_tiles, gl.full([seen_smem.type.shape[1]], 0, gl.int32, layout), key_tiles


@gluon.jit
def _store(out, lse, q_tile, destination_smem, total, top_M, sum_M, heads, tokens, DIAGONAL: gl.constexpr):
    """Store the results of a tile of rows, by way of the shared memory of its q, which is not needed any more."""
    layout: gl.constexpr = total.type.layout
    D: gl.constexpr = total.shape[1]
    whole_rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    destination_M = destination_smem.load(top_M.type.layout)
    ok = destination_M >= 0
    if DIAGONAL:
        destination_M = destination_M % heads * tokens + destination_M // heads
    gl.store(lse + destination_M, (top_M + gl.log2(sum_M)) * LN_2, mask=ok)
    # Whole rows at once: stored as the product leaves them, 4 bytes a thread, they would take longer.
    q_tile.store((total * gl.convert_layout(1.0 / sum_M, gl.SliceLayout(1, layout))[:, None]).to(q_tile.dtype))
    thread_barrier()
    destination_M = destination_smem.load(gl.SliceLayout(1, whole_rows))
    at = out + (destination_M.to(gl.int64) * D)[:, None] + gl.arange(0, D, gl.SliceLayout(0, whole_rows))[None, :]
    gl.store(at, q_tile.load(whole_rows), mask=(destination_M >= 0)[:, None])
    thread_barrier()


@gluon.jit
def attend_rows(
    out, lse, smem, barriers, half: gl.constexpr, heads, tokens, scale_log2, BLOCK: gl.constexpr, DIAGONAL: gl.constexpr
):  # fmt: skip
    """One warpgroup: results of half of the rows of one tile after the other."""
    q_smem, destination_smem, _seen_smem, _key_tiles_smem, k_smem, _v_smem = smem
    q_barriers, k_barriers, _v_barriers = barriers
    q_full, q_empty = q_barriers
    k_full, k_empty = k_barriers
    q_stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_smem.type.shape[1]
    D: gl.constexpr = q_smem.type.shape[2]
    N: gl.constexpr = k_smem.type.shape[1]
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, score)
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    no_top = gl.full([M], float("-inf"), gl.float32, rows)
    mbarrier.wait(q_full.index(half), 0)
    key_tiles, seen_M, clear = _seen(smem, half, rows, N, DIAGONAL)
    mbarrier.wait(k_full.index(0), 0, pred=key_tiles > 0)
    s = warpgroup_mma_wait(0, deps=[_scores(q_smem.index(half), k_smem, 0)])
    thread_barrier()
    mbarrier.arrive(k_empty.index(0), pred=key_tiles > 0)
    p, top_M = _probabilities(s, no_top, seen_M, scale_log2, DIAGONAL)
    sum_M = gl.sum(p, 1)
    # The warpgroups take every second stage of q each: even ones the first, odd ones the second.
    iteration, step = half, 0
    while key_tiles > 0:
        stage, following = iteration % q_stages, (iteration + 2) % q_stages
        q_tile = q_smem.index(stage)
        weights = gl.convert_layout(p.to(q_tile.dtype), left)
        steps = key_tiles if DIAGONAL else BLOCK // N
        state = (weights, gl.zeros([M, D], gl.float32, result), top_M, sum_M)
        # Tiles of keys that all rows see need no mask; the loop over the others comes last.
        for j in range(1, gl.minimum(steps, clear) if DIAGONAL else steps):
            state = _add_keys(state, q_tile, seen_M, smem, barriers, step + j, scale_log2, False)
        if DIAGONAL:
            for j in range(gl.maximum(clear, 1), steps):
                state = _add_keys(state, q_tile, seen_M - j * N, smem, barriers, step + j, scale_log2, True)
        weights, total, done_top_M, done_sum_M = state
        step += steps
        mbarrier.wait(q_full.index(following), (iteration + 2) // q_stages & 1)
        key_tiles, seen_M, clear = _seen(smem, following, rows, N, DIAGONAL)
        total, p, top_M, sum_M = _add_values(
            weights,
            total,
            q_smem.index(following),
            no_top,
            seen_M,
            smem,
            barriers,
            step,
            key_tiles > 0,
            scale_log2,
            DIAGONAL,
        )
        _store(out, lse, q_tile, destination_smem.index(stage), total, done_top_M, done_sum_M, heads, tokens, DIAGONAL)
        mbarrier.arrive(q_empty.index(stage))
        iteration += 2
