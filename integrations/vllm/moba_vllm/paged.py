"""MoBA, windows and full attention on a paged cache, in plain PyTorch on any device, for texts of any lengths.
New tokens are decoded by a kernel if one is given.

Shape suffixes: R texts, T new tokens of one text, S all its tokens, L pages of a text, P tokens of a page, H query
heads, K key/value heads, G = H / K, d head width, N blocks, B tokens of a block, M complete blocks of several texts,
C selected blocks, X heads that select (H, K or 1), J tokens that a query is given, x = G * T queries of a key/value
head, r some of these.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_vllm.layers import Moba, Window

PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Attention [R, H, d] of one token of each text to keys and values in pages. Called with queries [R, H, d], keys and
values [pages, P, K, d], the pages of each text [R, L], its tokens [R], and an upper bound of these."""
_ELEMENTS = 2**26
"""Scores, or elements of copied keys and values, in memory at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of softmax: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def page_problem(block_size: int, page_size: int) -> str:
    """Reason why blocks of this size cannot have their mean keys with pages of this size; empty if they can."""
    if block_size % page_size == 0 or page_size % block_size == 0:
        return ""
    return (
        f"--block-size: vLLM's pages have {page_size} tokens, MoBA's blocks {block_size}; allowed: pages that divide "
        f"the blocks, or the reverse; best is --block-size {block_size}"
    )


def text_rows(cache_LKPe: Tensor, pages_L: Tensor, tokens: int) -> Tensor:
    """Rows [tokens, K, e] of a text, in order."""
    page_size = cache_LKPe.shape[2]
    rows_LPKe = cache_LKPe[pages_L[: -(-tokens // page_size)].long()].transpose(1, 2)
    return rows_LPKe.flatten(0, 1)[:tokens]


def kernel_reads(cache_LKPe: Tensor, kind: Moba | Window | None) -> bool:
    """True if FlashAttention can read keys and values in these pages: on a GPU, in 16 bits, from units of a multiple of
    16 tokens."""
    page_size = cache_LKPe.shape[2]
    unit = min(page_size, kind.block_size) if isinstance(kind, Moba) else page_size
    return cache_LKPe.is_cuda and cache_LKPe.element_size() == 2 and unit % 16 == 0


class PooledKeys:
    """Mean keys of complete blocks, beside a layer's pages.

    The mean of a block lies at the page of its last token. A page with a prefix in the prefix cache has one sequence
    of tokens before it, so the mean stays right for every text that shares the page.
    """

    def __init__(self, cache_LKPe: Tensor, block_size: int) -> None:
        """cache_LKPe: all pages of the layer, each token's key and then its value."""
        pages, kv_heads, page_size, width = cache_LKPe.shape
        if problem := page_problem(block_size, page_size):
            raise ValueError(problem)
        self.block_size = block_size
        self.page_size = page_size
        self.keys = cache_LKPe.new_zeros(pages, max(1, page_size // block_size), kv_heads, width // 2)

    def update(self, cache_LKPe: Tensor, table_RL: Tensor, texts_M: Tensor, blocks_M: Tensor) -> None:
        """Compute the means of these blocks of these texts, all of whose keys are in the cache now.

        Sums run in `wide` in the order of the tokens and are rounded to the keys' dtype, as in training.
        """
        tokens_MB = blocks_M[:, None] * self.block_size + torch.arange(self.block_size, device=blocks_M.device)
        pages_MB = table_RL[texts_M[:, None], tokens_MB // self.page_size].long()
        head_dim = self.keys.shape[-1]
        keys_MBKd = cache_LKPe[..., :head_dim][pages_MB, :, tokens_MB % self.page_size]
        lengths_M = torch.full_like(blocks_M, self.block_size)
        rows = keys_MBKd.to(wide(keys_MBKd.dtype)).flatten(0, 1).flatten(1)
        sums = torch.segment_reduce(rows, "sum", lengths=lengths_M, axis=0, initial=0.0, unsafe=True)
        means_MKd = (sums / self.block_size).to(self.keys.dtype).unflatten(1, keys_MBKd.shape[2:])
        self.keys[pages_MB[:, -1], tokens_MB[:, -1] % self.page_size // self.block_size] = means_MKd

    def read(self, table_RL: Tensor, blocks: int) -> Tensor:
        """Means [R, N, K, d] of the first `blocks` blocks of each text. What is not complete there has no meaning."""
        last_N = torch.arange(1, blocks + 1, device=table_RL.device) * self.block_size - 1
        return self.keys[table_RL[:, last_N // self.page_size].long(), last_N % self.page_size // self.block_size]


def select_blocks(q_RTHd: Tensor, pooled_RNKd: Tensor, own_RT: Tensor, moba: Moba) -> Tensor:
    """Ids [R, X, T, C] of the history blocks that each query selects; its own block's id where there are fewer.

    Scores are exact products summed in float64, so that the selection does not depend on how many queries come
    together: not on the chunks of a prefill. Of equal scores, the earlier block is selected.
    """
    kv_heads = pooled_RNKd.shape[2]
    blocks = pooled_RNKd.shape[1]
    q_RKxd = q_RTHd.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores_RKxN = q_RKxd.double() @ pooled_RNKd.permute(0, 2, 3, 1).double()
    scores = scores_RKxN.to(wide(q_RTHd.dtype)).unflatten(2, (-1, q_RTHd.shape[1]))
    scores_RXTN = scores.sum(2) if moba.select == "group" else scores.flatten(1, 2)
    own_R1T1 = own_RT[:, None, :, None]
    ids_N = torch.arange(blocks, device=q_RTHd.device)
    limits = torch.finfo(scores_RXTN.dtype)
    scores_RXTN = scores_RXTN.clamp(limits.min, limits.max)
    if "previous" in moba.always:
        scores_RXTN = scores_RXTN.masked_fill(ids_N == own_R1T1 - 1, torch.inf)
    if "first" in moba.always:
        scores_RXTN = scores_RXTN.masked_fill(ids_N == 0, torch.inf)
    scores_RXTN = scores_RXTN.masked_fill(ids_N >= own_R1T1, -torch.inf)
    best_RXTC = scores_RXTN.sort(dim=-1, descending=True, stable=True).indices[..., : moba.topk - 1]
    return torch.minimum(best_RXTC, own_R1T1)


def attend_from_one(
    q_RHd: Tensor,
    cache_LKPe: Tensor,
    table_RL: Tensor,
    positions_R: Tensor,
    longest: int,
    kind: Moba | Window | None,
    pooled: PooledKeys | None,
    scale: float,
    paged: PagedAttention | None = None,
) -> Tensor:
    """Attention [R, H, d] of one token of each text; kind None: to all tokens before.

    longest: tokens of the longest text, with the new one
    paged: kernel that reads keys and values in their pages; windows, and all kinds without it, attend to copies
    """
    heads, head_dim = q_RHd.shape[1:]
    kv_heads = cache_LKPe.shape[1]
    at_R11 = positions_R[:, None, None]
    if paged is not None and kind is None:
        k_LPKd, v_LPKd = cache_LKPe.transpose(1, 2).split(head_dim, -1)
        return paged(q_RHd, k_LPKd, v_LPKd, table_RL, positions_R + 1, longest)
    if isinstance(kind, Moba):
        assert pooled is not None
        blocks_RXC, real_RXC = _blocks_of_one(q_RHd, table_RL, positions_R, longest, kind, pooled)
        if paged is not None:
            return _attend_by_pages(q_RHd, cache_LKPe, table_RL, positions_R, blocks_RXC, real_RXC, kind, paged)
        tokens_RXCB = blocks_RXC[..., None] * kind.block_size + torch.arange(kind.block_size, device=q_RHd.device)
        tokens_RXJ = tokens_RXCB.flatten(2)
        seen_RXJ = real_RXC.repeat_interleave(kind.block_size, -1) & (tokens_RXJ <= at_R11)
    elif kind is not None:
        begin_R11 = at_R11 - kind.window + 1
        sinks_11J = torch.arange(kind.sinks, device=q_RHd.device).expand(1, 1, -1)
        windows_R1J = begin_R11 + torch.arange(kind.window, device=q_RHd.device)
        tokens_RXJ = torch.cat([sinks_11J.expand(len(q_RHd), -1, -1), windows_R1J], -1)
        seen_RXJ = torch.cat([sinks_11J < begin_R11, windows_R1J >= 0], -1)
    else:
        tokens_RXJ = torch.arange(longest, device=q_RHd.device).expand(len(q_RHd), 1, -1)
        seen_RXJ = tokens_RXJ <= at_R11

    tokens_RXJ = tokens_RXJ.clamp(0, longest - 1)
    page_size = cache_LKPe.shape[2]
    sharing = heads // kv_heads if tokens_RXJ.shape[1] == heads else 1
    copies_Y1 = torch.arange(kv_heads, device=q_RHd.device).repeat_interleave(sharing)[:, None]
    out_RHd = torch.empty_like(q_RHd)
    some = max(1, _ELEMENTS // (len(copies_Y1) * tokens_RXJ.shape[-1] * 2 * head_dim))
    for rows in torch.arange(len(q_RHd)).split(some):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        tokens_rXJ = tokens_RXJ[part]
        pages_rXJ = table_RL[part].gather(1, (tokens_rXJ // page_size).flatten(1)).view_as(tokens_rXJ).long()
        kv_rYJe = cache_LKPe[pages_rXJ, copies_Y1, tokens_rXJ % page_size]
        q_rYgd = q_RHd[part].unflatten(1, (len(copies_Y1), -1))
        k_rYJd, v_rYJd = kv_rYJe.split(head_dim, -1)
        seen_rX1J = seen_RXJ[part, :, None]
        out = F.scaled_dot_product_attention(q_rYgd, k_rYJd, v_rYJd, seen_rX1J, scale=scale)
        out_RHd[part] = out.flatten(1, 2)
    return out_RHd


def _blocks_of_one(
    q_RHd: Tensor, table_RL: Tensor, positions_R: Tensor, longest: int, moba: Moba, pooled: PooledKeys
) -> tuple[Tensor, Tensor]:
    """Ids of the blocks that one token of each text attends to, its own last, and which of them count, both
    [R, X, C + 1]."""
    own_R1 = positions_R[:, None] // moba.block_size
    pooled_RNKd = pooled.read(table_RL, longest // moba.block_size)
    history_RXC = select_blocks(q_RHd[:, None], pooled_RNKd, own_R1, moba)[:, :, 0]
    own_RX1 = own_R1[:, None].expand(-1, history_RXC.shape[1], -1)
    real_RXC = torch.cat([history_RXC != own_RX1, torch.ones_like(own_RX1, dtype=torch.bool)], -1)
    return torch.cat([history_RXC, own_RX1], -1), real_RXC


def _attend_by_pages(
    q_RHd: Tensor,
    cache_LKPe: Tensor,
    table_RL: Tensor,
    positions_R: Tensor,
    blocks_RXC: Tensor,
    real_RXC: Tensor,
    moba: Moba,
    paged: PagedAttention,
) -> Tensor:
    """Attention to these blocks. For the kernel each selecting head is a text of its own, with one key/value head and
    the pages of its blocks: those before its own first, as they are full, then its own up to the new token."""
    pages, kv_heads, page_size, width = cache_LKPe.shape
    selecting = blocks_RXC.shape[1]
    unit = min(page_size, moba.block_size)  # tokens of what is one page, or a part of one that is a block
    order_RXC = real_RXC.int().argsort(dim=-1, descending=True, stable=True)  # those that count first
    starts_U = torch.arange(0, moba.block_size, unit, device=q_RHd.device)
    tokens_RXY = (blocks_RXC.gather(-1, order_RXC)[..., None] * moba.block_size + starts_U).flatten(2)
    # Nothing is read of blocks behind the text.
    tokens_RXY = tokens_RXY.clamp(max=table_RL.shape[1] * page_size - unit)
    pages_RXY = table_RL.gather(1, (tokens_RXY // page_size).flatten(1)).view_as(tokens_RXY)
    kv_head_X1 = torch.arange(selecting, device=q_RHd.device)[:, None] // (selecting // kv_heads)
    units_RXY = (pages_RXY * kv_heads + kv_head_X1) * (page_size // unit) + tokens_RXY % page_size // unit
    kv = cache_LKPe.view(pages * kv_heads * (page_size // unit), unit, 1, width)
    lengths_RX = (real_RXC.sum(-1) - 1) * moba.block_size + (positions_R % moba.block_size + 1)[:, None]
    q = q_RHd.unflatten(1, (selecting, -1)).flatten(0, 1)
    most = blocks_RXC.shape[-1] * moba.block_size
    k, v = kv.split(width // 2, -1)
    out = paged(q, k, v, units_RXY.flatten(0, 1), lengths_RX.flatten(), most)
    return out.view_as(q_RHd)


def attend_from_many(
    q_THd: Tensor, kv_SKe: Tensor, pooled_NKd: Tensor | None, kind: Moba | Window | None, scale: float
) -> Tensor:
    """Attention [T, H, d] of the last T tokens of one text; kind None: to all tokens before.

    kv_SKe: keys, then values, of all its tokens
    pooled_NKd: mean keys of its complete blocks
    """
    head_dim = q_THd.shape[-1]
    k_SKd, v_SKd = kv_SKe.split(head_dim, -1)
    if isinstance(kind, Moba):
        assert pooled_NKd is not None
        kernels = _kernels(kind, head_dim, scale) if q_THd.is_cuda else None
        if kernels is not None:
            return kernels(q_THd, k_SKd.contiguous(), v_SKd.contiguous(), pooled_NKd)
        some = max(1, _ELEMENTS // (q_THd.shape[1] * max(kind.block_size, len(pooled_NKd))))
    else:
        some = max(128, kind.window) if kind else max(1, _ELEMENTS // (q_THd.shape[1] * len(kv_SKe)))
    out_THd = torch.empty_like(q_THd)
    before = len(kv_SKe) - len(q_THd)
    for begin in range(0, len(q_THd), some):
        end = min(begin + some, len(q_THd))
        given = q_THd[begin:end], k_SKd[: before + end], v_SKd[: before + end]
        if isinstance(kind, Moba):
            out_THd[begin:end] = _attend_to_blocks(*given, pooled_NKd, kind, scale)  # type: ignore[arg-type]  # not None
        else:
            out_THd[begin:end] = _attend_to_window(*given, kind, scale)
    return out_THd


def _attend_to_window(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, kind: Window | None, scale: float) -> Tensor:
    """Attention of the last T tokens to their window and to the sinks, or to all tokens before."""
    keys_s = torch.arange(len(k_SKd), device=q_THd.device)
    positions_T1 = keys_s[-len(q_THd) :, None]
    if kind is not None:
        first = max(0, len(k_SKd) - len(q_THd) - kind.window + 1)
        keys_s = torch.cat([keys_s[: min(kind.sinks, first)], keys_s[first:]])
    seen_Ts = keys_s <= positions_T1
    if kind is not None:
        seen_Ts &= (positions_T1 - keys_s < kind.window) | (keys_s < kind.sinks)
    q_1HTd, k_1Ksd, v_1Ksd = (x.transpose(0, 1)[None] for x in (q_THd, k_SKd[keys_s], v_SKd[keys_s]))
    out_1HTd = F.scaled_dot_product_attention(q_1HTd, k_1Ksd, v_1Ksd, seen_Ts, scale=scale, enable_gqa=True)
    return out_1HTd[0].transpose(0, 1)


def _attend_to_blocks(
    q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, pooled_NKd: Tensor, moba: Moba, scale: float
) -> Tensor:
    """MoBA of the last T tokens, block by block from the queries that selected it, merged by online softmax."""
    tokens, kv_heads, head_dim = k_SKd.shape
    dtype = wide(q_THd.dtype)
    positions_T = torch.arange(tokens - len(q_THd), tokens, device=q_THd.device)
    own_T = positions_T // moba.block_size
    selected_XTC = select_blocks(q_THd[None], pooled_NKd[None], own_T[None], moba)[0]
    chosen_XTN = selected_XTC.new_zeros(*selected_XTC.shape[:2], -(-tokens // moba.block_size), dtype=torch.bool)
    chosen_XTN.scatter_(-1, selected_XTC, True).scatter_(-1, own_T[:, None].expand(len(chosen_XTN), -1, 1), True)
    chosen_HTN = chosen_XTN.repeat_interleave(q_THd.shape[1] // len(chosen_XTN), 0)
    chosen_NKx = chosen_HTN.unflatten(0, (kv_heads, -1)).flatten(1, 2).permute(2, 0, 1)
    q_Kxd = q_THd.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2) * scale
    positions_x = positions_T.repeat(q_THd.shape[1] // kv_heads)
    # The largest score so far is not -inf: differences stay numbers.
    largest_Kx = torch.full_like(q_Kxd[..., 0], torch.finfo(dtype).min)
    sum_Kx = torch.zeros_like(largest_Kx)
    out_Kxd = torch.zeros_like(q_Kxd)
    for block, most in enumerate(chosen_NKx.sum(-1).amax(-1).tolist()):
        if most == 0:
            continue
        # The queries that selected the block come first; heads with fewer of them get others, which see nothing.
        rows_Kr = chosen_NKx[block].int().argsort(dim=1, descending=True, stable=True)[:, :most]
        rows_Krd = rows_Kr[..., None].expand(-1, -1, head_dim)
        keys = slice(block * moba.block_size, (block + 1) * moba.block_size)
        k_KBd, v_KBd = (x[keys].to(dtype).transpose(0, 1) for x in (k_SKd, v_SKd))
        at_B = torch.arange(keys.start, keys.start + k_KBd.shape[1], device=q_THd.device)
        seen_KrB = chosen_NKx[block].gather(1, rows_Kr)[..., None] & (at_B <= positions_x[rows_Kr][..., None])
        scores_KrB = (q_Kxd.gather(1, rows_Krd) @ k_KBd.transpose(1, 2)).masked_fill(~seen_KrB, -torch.inf)
        before_Kr = largest_Kx.gather(1, rows_Kr)
        after_Kr = torch.maximum(before_Kr, scores_KrB.amax(-1))
        p_KrB = (scores_KrB - after_Kr[..., None]).exp()
        keep_Kr = (before_Kr - after_Kr).exp()
        out_Krd = out_Kxd.gather(1, rows_Krd) * keep_Kr[..., None] + p_KrB @ v_KBd
        out_Kxd.scatter_(1, rows_Krd, out_Krd)
        sum_Kx.scatter_(1, rows_Kr, sum_Kx.gather(1, rows_Kr) * keep_Kr + p_KrB.sum(-1))
        largest_Kx.scatter_(1, rows_Kr, after_Kr)
    out_KGTd = (out_Kxd / sum_Kx[..., None]).unflatten(1, (-1, len(q_THd)))
    return out_KGTd.permute(2, 0, 1, 3).flatten(1, 2).to(q_THd.dtype)


@cache
def _kernels(moba: Moba, head_dim: int, scale: float) -> Any | None:
    """moba_train's kernels for this attention, called as `kernels(q, k, v, pooled)`; None if it is not installed."""
    try:
        from moba_train.attention.layout import TokenRange, packed_layout
        from moba_train.attention.moba.moba_local import MobaAttention
    except ImportError:
        return None
    options = {name: getattr(moba, name) for name in ("block_size", "topk", "select", "always")}
    attention = MobaAttention(MobaAttention.Options(**options), head_dim, scale)

    def attend(q_THd: Tensor, k_SKd: Tensor, v_SKd: Tensor, pooled_NKd: Tensor) -> Tensor:
        tokens = len(k_SKd)
        layout = packed_layout([tokens], q_THd.device).part((TokenRange(tokens - len(q_THd), tokens),), None)
        # A row for each id up to the bound that the gate counts: zeros for the block that is not complete.
        pooled = F.pad(pooled_NKd, (0, 0, 0, 0, 0, 1))
        return attention.attend(q_THd, k_SKd, v_SKd, layout, attention.select(q_THd, pooled, layout))[0]

    return attend
