"""One query of each sequence against its cached keys: all of them, or those of selected blocks and of its diagonal
block.

Decoding is bound by the bytes of keys and values it reads. A program takes query heads that read the same keys (all
heads of a key/value head, or a single one where every head selects for itself) and one of several equal parts of what
they read, so that few sequences still fill the GPU; a second kernel joins the parts by online softmax. This is split-KV
decoding (Flash-Decoding, Dao et al. 2023) over a list of blocks.

Sizes: B sequences, H query heads, D head width, HISTORY selected blocks, P parts, M rows of a program (its query heads,
at least the 16 of a tensor core), N keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.kernels.common.softmax import LOG2_E, LOWEST, normalised

# Programs of 4 warps; several on a multiprocessor hide each other's loads.
_PROGRAMS_PER_SM = 4
_LEAST_TILES = 4
"""Tiles of keys that make a part worth its own program."""


def decode(
    q_BHD: Tensor, cached: CachedKeys, *, scale: float, block_size: int = 0, selected_HBC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, H, D] and lse [H, B] of `LocalAttention.decode`.

    `selected_HBC`: int32, blocks of each sequence, counted from its first token, -1 for none; the diagonal block is
    read in addition. None: all keys are read. Where the heads of a key/value head have the same list it is read once,
    if `selected_HBC` has a row for each key/value head instead of each query head.
    """
    batch, heads, head_dim = q_BHD.shape
    kv_heads = cached.k_RKD.shape[1]
    lists = kv_heads if selected_HBC is None else selected_HBC.shape[0]
    group = heads // lists
    # Fewer rows than 16 are filled up: the matrix instruction has no smaller tile, and the time is that of the keys'
    # bytes.
    rows = max(16, triton.next_power_of_2(group))
    # Tiles divide a block, so that a tile never reads keys of two blocks.
    tile = _tile(block_size) if selected_HBC is not None else 128
    history_blocks = 0 if selected_HBC is None else selected_HBC.shape[2]
    longest = max(stop - start for start, stop in cached.ranges)
    tiles = triton.cdiv(longest, tile) if selected_HBC is None else (history_blocks + 1) * (block_size // tile)
    parts = _parts(tiles, batch * lists, q_BHD.device)
    # float32: up to 256 parts are summed, and there are few rows.
    partial = torch.empty(parts, batch, heads, head_dim, dtype=torch.float32, device=q_BHD.device)
    partial_lse = torch.empty(parts, batch, heads, dtype=torch.float32, device=q_BHD.device)
    assert cached.k_RKD.is_contiguous()
    assert cached.v_RKD.is_contiguous()
    _attend[(batch * lists, parts)](
        q=q_BHD.contiguous(),
        k=cached.k_RKD,
        v=cached.v_RKD,
        selected=q_BHD if selected_HBC is None else selected_HBC.contiguous(),
        bounds=cached.bounds(),
        partial=partial,
        partial_lse=partial_lse,
        batch=batch,
        lists=lists,
        tiles=tiles,
        per_part=triton.cdiv(tiles, parts),
        scale_log2=scale * LOG2_E.value,
        HISTORY=history_blocks,
        BLOCK=block_size,
        HEADS=heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        M=rows,
        N=tile,
        num_warps=4,
        num_stages=3,
    )
    out = torch.empty_like(q_BHD)
    lse = torch.empty(heads, batch, dtype=torch.float32, device=q_BHD.device)
    slots = triton.next_power_of_2(parts)
    _join[(batch, heads)](
        partial=partial,
        partial_lse=partial_lse,
        out=out,
        lse=lse,
        parts=parts,
        batch=batch,
        HEADS=heads,
        D=head_dim,
        P=slots,
        num_warps=4,
    )
    return out, lse


def _tile(block_size: int) -> int:
    """The longest tile of keys that divides a block."""
    return next(tile for tile in (128, 64, 32, 16) if block_size % tile == 0)


def _parts(tiles: int, programs: int, device: torch.device) -> int:
    """Parts of the tiles of a program: as many as let all programs together fill the GPU."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = triton.cdiv(_PROGRAMS_PER_SM * sms, programs)
    return max(1, min(wanted, triton.cdiv(tiles, _LEAST_TILES), 256))


@triton.jit(do_not_specialize=["batch", "lists", "tiles", "per_part"])
def _attend(
    q, k, v, selected, bounds, partial, partial_lse, batch, lists, tiles, per_part, scale_log2,
    HISTORY: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One part of what GROUP query heads of a sequence read; BLOCK 0: all keys, else HISTORY listed blocks and the
    diagonal one."""
    sequence = tl.program_id(0) // lists
    chooser = tl.program_id(0) % lists  # whose list it is: a query head, or a key/value head
    part = tl.program_id(1)
    head_M = chooser * GROUP + tl.arange(0, M)
    ok_M = tl.arange(0, M) < GROUP
    kv_head = chooser * GROUP // (HEADS // KV_HEADS)
    column = tl.arange(0, D)
    start = tl.load(bounds + sequence * 2)
    length = (tl.load(bounds + sequence * 2 + 1) - start).to(tl.int32)
    q_at = (sequence * HEADS + head_M)[:, None] * D + column[None, :]
    q_MD = tl.load(q + q_at, mask=ok_M[:, None], other=0.0)

    # Not -inf: a part may lie wholly behind a short sequence's end, and -inf less -inf is NaN.
    top_M = tl.full([M], LOWEST, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    out_MD = tl.zeros([M, D], tl.float32)
    first = part * per_part
    for tile in tl.range(first, tl.minimum(first + per_part, tiles)):
        if BLOCK == 0:
            token_N = tile * N + tl.arange(0, N)
            ok_N = token_N < length
        else:
            slot = tile // (BLOCK // N)
            listed = tl.load(selected + (chooser * batch + sequence) * HISTORY + slot, mask=slot < HISTORY, other=-1)
            block = tl.where(slot < HISTORY, listed, (length - 1) // BLOCK)
            token_N = block * BLOCK + (tile % (BLOCK // N)) * N + tl.arange(0, N)
            ok_N = (block >= 0) & (token_N < length)
        key_at = ((start + token_N) * KV_HEADS + kv_head)[:, None] * D + column[None, :]
        k_ND = tl.load(k + key_at, mask=ok_N[:, None], other=0.0)
        v_ND = tl.load(v + key_at, mask=ok_N[:, None], other=0.0)
        s_MN = tl.dot(q_MD, k_ND.T) * scale_log2
        s_MN = tl.where(ok_N[None, :], s_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(s_MN, 1))
        p_MN = tl.math.exp2(s_MN - new_top_M[:, None])
        shrink_M = tl.math.exp2(top_M - new_top_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        out_MD = out_MD * shrink_M[:, None] + tl.dot(p_MN.to(v_ND.dtype), v_ND)
        top_M = new_top_M
    out_MD, lse_M = normalised(out_MD, top_M, sum_M, PARTIAL=True)
    row_M = (part * batch + sequence).to(tl.int64) * HEADS + head_M
    tl.store(partial + row_M[:, None] * D + column[None, :], out_MD, mask=ok_M[:, None])
    tl.store(partial_lse + row_M, lse_M, mask=ok_M)


@triton.jit(do_not_specialize=["parts", "batch"])
def _join(partial, partial_lse, out, lse, parts, batch, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr):
    """The parts of one head of one sequence; at least one of them saw a key, that of the query."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, D)
    part_P = tl.arange(0, P)
    row_P = (part_P * batch + sequence).to(tl.int64) * HEADS + head
    lse_P = tl.load(partial_lse + row_P, mask=part_P < parts, other=float("-inf"))
    top = tl.max(lse_P, 0)
    total = tl.sum(tl.exp(lse_P - top), 0)
    joined_D = tl.zeros([D], tl.float32)
    for part in tl.range(0, parts):
        row = (part * batch + sequence).to(tl.int64) * HEADS + head
        weight = tl.exp(tl.load(partial_lse + row) - top)
        joined_D += tl.load(partial + row * D + column) * weight
    tl.store(out + (sequence * HEADS + head) * D + column, (joined_D / total).to(out.dtype.element_ty))
    tl.store(lse + head * batch + sequence, top + tl.log(total))
