"""One tile of keys and the rows that attend to it: all gradients in one pass, as two consumer warpgroups compute them.

Five matrix products where two passes take seven. Producers copy tiles of rows to shared memory
(blocks_128_gradients.py, blocks_256_to_4096_gradients.py); dk and dv stay in the consumers' registers. Behind the last
products of a tile of rows come the scores of the next, so that the matrix units wait for little else than the
exponentials.

A row's dq is a sum over the tiles of keys of a block, kept in memory, in float32 where they are more than eight. They
add to it one after the other, always in the same order, so gradients are reproducible.

Operands that do not move in shared memory are taken by an index that is always 0, which the compiler cannot know. Else
it keeps the addresses of all operands in registers; these do not suffice then, and the products wait for each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moba_train.attention.kernels.hopper import copy_to_shared, thread_barrier

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def copy_keys(k_desc, v_desc, smem, keys_full, first_key, column):
    """The keys and values from `first_key` on, of the head whose columns begin at `column`."""
    mbarrier.expect(keys_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    copy_to_shared(k_desc, [first_key, column], keys_full, smem[0].index(0))
    copy_to_shared(v_desc, [first_key, column], keys_full, smem[1].index(0))


@gluon.jit
def allocate_shared(k_desc, M: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """(shared memory of the operands, barriers): STAGES stages for tiles of M rows, each full after ARRIVALS arrivals.

    A kernel must wait for every barrier that it makes: else the compiler gives the barrier's memory to something else,
    which crashed when another process ran on the GPU (benchmarks/LOG.md, "Wrong results").
    """
    dtype: gl.constexpr = k_desc.dtype
    N: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, M, D], tile)
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES, M, D], tile)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, M], flat)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, M], flat)
    k_smem = gl.allocate_shared_memory(dtype, [1, N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, N, D], k_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [1, N, M], gl.NVMMASharedLayout(128, 16, 2))
    dq_smem = gl.allocate_shared_memory(dtype, [1, M, D], tile)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(keys_full, count=1)
    fence_async_shared()
    smem = (k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, ds_smem, dq_smem)
    return smem, (full, empty, keys_full)


@gluon.jit
def _exponent(s, lse_smem, key_N, at_M, scale_log2, CAUSAL: gl.constexpr):
    """log2 of the probabilities [N, M]; CAUSAL: of key_N no later than at_M."""
    lse_M = lse_smem.load(gl.SliceLayout(0, s.type.layout))
    exponent = s * scale_log2 - lse_M[None, :]
    if CAUSAL:
        exponent = gl.where(key_N[:, None] <= at_M[None, :], exponent, float("-inf"))
    return exponent


@gluon.jit
def row_tile(iteration, first, tiles, M: gl.constexpr, CAUSAL: gl.constexpr):
    """(first row, head of the group) of an iteration: packed rows, or CAUSAL the rows of one head after the other."""
    if CAUSAL:
        divisor = gl.maximum(tiles, 1)
        return first + iteration % divisor * M, iteration // divisor
    else:
        return first + iteration * M, 0


@gluon.jit
def multiply(
    dq_out, destination_smem, smem, barriers, first, end, tiles, iterations, iterations_before, key_tile, first_key,
    first_head, heads, scale, N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, SCATTERED: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: (dk, dv [N, D], dk not yet scaled) of one tile of keys, from `iterations` tiles of rows
    (`row_tile`).

    Their dq goes to dq_out [rows, heads, D], for rows before `end`, added to what is there unless this is the block's
    first tile of keys. SCATTERED: to the rows named in `destination_smem`, which come with the tile, whatever `end` is.
    CAUSAL: a row sees the keys up to its own number; `first_key` is the first of the tile, counted as rows are.
    `iterations_before`: those since the barriers were made.
    """
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, ds_smem, dq_smem = smem
    full, empty, keys_full = barriers
    stages: gl.constexpr = q_smem.type.shape[0]
    M: gl.constexpr = q_smem.type.shape[1]
    dtype: gl.constexpr = q_smem.dtype
    # Scores stand transposed, keys by rows, so that probabilities are the left operand of dv from registers.
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, M, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, keys, 2)
    dq_dtype: gl.constexpr = dq_out.dtype.element_ty
    # Whole rows of dq through shared memory: with 4 bytes a thread 8K 512/3 took 0.89 ms here, with 16 0.572 (by a
    # script, not kept).
    columns: gl.constexpr = 4 if dq_dtype == gl.float32 else 8  # 16 bytes a thread
    whole_rows: gl.constexpr = gl.BlockedLayout([1, columns], [32 * columns // D, D // columns], [8, 1], [1, 0])

    scale_log2 = scale * LOG2_E
    dk = gl.zeros([N, D], gl.float32, keys)
    dv = gl.zeros([N, D], gl.float32, keys)
    no_score = gl.zeros([N, M], gl.float32, score)
    no_dq = gl.zeros([M, D], gl.float32, rows)
    key_N = first_key + gl.arange(0, N, gl.SliceLayout(1, score))
    i_M = gl.arange(0, M, gl.SliceLayout(0, score))
    stage = iterations_before % stages
    mbarrier.wait(keys_full, key_tile & 1 if CAUSAL else 0)
    mbarrier.wait(full.index(stage), iterations_before // stages & 1, pred=iterations > 0)
    token = warpgroup_mma(k_smem.index(0), q_smem.index(stage).permute([1, 0]), no_score, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[token])
    exponent = _exponent(s, lse_smem.index(stage), key_N, first + i_M, scale_log2, CAUSAL)
    for i in range(iterations):
        # Always 0, which the compiler cannot know: see the head of this file.
        zero = i >> 30
        k_tile, v_tile, ds_tile, dq_tile = (
            k_smem.index(zero), v_smem.index(zero), ds_smem.index(zero), dq_smem.index(zero)
        )  # fmt: skip
        step = iterations_before + i
        stage, following = step % stages, (step + 1) % stages
        q_tile, dout_tile = q_smem.index(stage), dout_smem.index(stage)
        at, head = row_tile(i, first, tiles, M, CAUSAL)
        dp_token = warpgroup_mma(v_tile, dout_tile.permute([1, 0]), no_score, use_acc=False, is_async=True)
        p = gl.exp2(exponent)
        dv_token = warpgroup_mma(gl.convert_layout(p.to(dtype), left), dout_tile, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_token])
        delta_M = delta_smem.index(stage).load(gl.SliceLayout(0, score))
        ds_tile.store((p * (dp - delta_M[None, :])).to(dtype))
        fence_async_shared()
        thread_barrier()
        # dk takes ds from shared memory as well: as a register operand it left too few registers, and the products
        # waited for each other (ptxas remarks C7512, C7514; a test refuses them).
        dq_token = warpgroup_mma(ds_tile.permute([1, 0]), k_tile, no_dq, use_acc=False, is_async=True)
        dk_token = warpgroup_mma(ds_tile, q_tile, dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_token])
        mbarrier.wait(full.index(following), (step + 1) // stages & 1, pred=i + 1 < iterations)
        # The next tile's scores are issued before this tile's dq is stored, so that the matrix units have work until
        # then.
        s_token = warpgroup_mma(k_tile, q_smem.index(following).permute([1, 0]), no_score, use_acc=False, is_async=True)
        # Whole rows at once: stored as the product leaves them, 4 bytes a thread, they would take longer than it.
        if SCATTERED:
            row_M = destination_smem.index(stage).load(gl.SliceLayout(1, whole_rows))
        else:
            row_M = at + gl.arange(0, M, gl.SliceLayout(1, whole_rows))
        address = dq_out + ((row_M.to(gl.int64) * heads + first_head + head) * D)[:, None]
        address = address + gl.arange(0, D, gl.SliceLayout(0, whole_rows))[None, :]
        if SCATTERED:
            ok = True  # one more register for each row would not fit
            added = key_tile > 0
        else:
            ok = (row_M < end)[:, None]
            added = ok & (key_tile > 0)
        # Past the first-level cache, which does not see what other multiprocessors have written.
        before = gl.load(address, mask=added, other=0.0, cache_modifier=".cg")
        dk, dq = warpgroup_mma_wait(1, deps=[dk_token, dq_token])
        dq_tile.store((dq * scale).to(dtype))
        thread_barrier()
        total = dq_tile.load(whole_rows).to(gl.float32) + before.to(gl.float32)
        gl.store(address, total.to(dq_dtype), mask=ok)
        thread_barrier()
        mbarrier.arrive(empty.index(stage))
        # Waited for and turned into exponents before the iteration ends: an accumulator in flight across iterations
        # made the compiler let all products wait (benchmarks/LOG.md, "Gradients").
        s = warpgroup_mma_wait(0, deps=[s_token])
        at, head = row_tile(i + 1, first, tiles, M, CAUSAL)
        exponent = _exponent(s, lse_smem.index(following), key_N, at + i_M, scale_log2, CAUSAL)
    return dk, dv


@gluon.jit
def store_parts(part_dk, part_dv, dk_ND, dv_ND, scale, tile, exists):
    """Store dk, scaled, and dv of `multiply` as a tile of part_dk and part_dv [tiles, N, D], float32, if it
    `exists`."""
    N: gl.constexpr = dk_ND.type.shape[0]
    D: gl.constexpr = dk_ND.type.shape[1]
    layout: gl.constexpr = dk_ND.type.layout
    key = gl.arange(0, N, gl.SliceLayout(1, layout))
    at = key[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    offset = tile * N * D
    gl.store(part_dk + offset + at, dk_ND * scale, mask=exists)
    gl.store(part_dv + offset + at, dv_ND, mask=exists)
