"""Block tables: which block each token is in, and where each block lies. Computed on the device, once per layout.

Queries and keys may each be a part of the sequence (a shard, made of token ranges). A block is consecutive tokens, so
its given rows are consecutive; where it also lies in one range, its rows and its tokens differ by one number.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.blocks.geometry import block_bound, first_blocks
from moba_train.attention.blocks.triton.launch import ceil_div, launch
from moba_train.attention.protocol import Layout, TokenRanges


@dataclass(frozen=True)
class BlockTables:
    """The documents and blocks of a layout, as kernels read them."""

    blocks: int
    """Upper bound of the number of blocks, known on the host."""
    own_T: Tensor
    """int32 [T]: each token's block."""
    first_T: Tensor
    """int32 [T]: the first block of each token's document."""
    bounds: Tensor
    """int32 [blocks, 6]: first row of q, one past the last, token minus row; then these three for the rows of k. First
    and last are equal for blocks without given rows and for ids that name no block."""


def block_tables(layout: Layout, block_size: int) -> BlockTables:
    """The tables of a layout; kept with it."""
    return layout.cached(("block tables", block_size), lambda: _build(layout, block_size))


def _build(layout: Layout, block_size: int) -> BlockTables:
    blocks = block_bound(layout, block_size)
    tokens = layout.total
    device = layout.cu_seqlens.device
    documents = layout.cu_seqlens.numel() - 1
    first = first_blocks(layout.cu_seqlens, block_size).to(torch.int32)
    own_T, first_T = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    bounds = torch.empty(blocks, 6, dtype=torch.int32, device=device)
    steps = documents.bit_length()
    size = 256
    if tokens:
        launch(
            _token_tables,
            (ceil_div(tokens, size),),
            layout.cu_seqlens,
            first,
            own_T,
            first_T,
            tokens,
            documents,
            block_size,
            steps,
            SIZE=size,
        )
    if blocks:
        launch(
            _block_bounds,
            (ceil_div(blocks, size),),
            layout.cu_seqlens,
            first,
            bounds,
            blocks,
            documents,
            block_size,
            steps,
            SIZE=size,
        )
    if layout.q_ranges is not None:
        own_T, first_T = own_T[layout.q_tokens], first_T[layout.q_tokens]
        bounds[:, :3] = _rows_of(bounds[:, :2].clone(), layout.q_ranges)
    if layout.k_ranges is not None:
        bounds[:, 3:] = _rows_of(bounds[:, 3:5].clone(), layout.k_ranges)
    return BlockTables(blocks, own_T, first_T, bounds)


def _rows_of(tokens_N2: Tensor, ranges: TokenRanges) -> Tensor:
    """[blocks, 3] for a part made of `ranges`, from each block's first token and one past its last."""
    rows_N2 = torch.zeros_like(tokens_N2)
    token_N = tokens_N2[:, 1].clone()
    for start, stop in reversed(ranges):
        rows_N2 += (tokens_N2 - start).clamp(0, stop - start)
        here = (tokens_N2[:, 0] < stop) & (tokens_N2[:, 1] > start)
        token_N = torch.where(here, tokens_N2[:, 0].clamp(min=start), token_N)
    return torch.cat([rows_N2, (token_N - rows_N2[:, 0])[:, None]], 1)


@triton.jit
def _document_of(edges, x, documents, steps):
    """Largest i < documents with edges[i] <= x, so that empty documents own nothing (edges ascend, edges[0] = 0)."""
    low = tl.zeros_like(x)
    high = low + documents
    for _ in range(steps):
        middle = (low + high) // 2
        inside = middle > low
        below = tl.load(edges + middle, mask=inside, other=0) <= x
        high = tl.where(inside & (below == 0), middle, high)
        low = tl.where(inside & below, middle, low)
    return low


@triton.jit(do_not_specialize=["tokens", "documents", "steps"])
def _token_tables(cu_seqlens, first, own, first_of, tokens, documents, block_size, steps, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = token < tokens
    document = _document_of(cu_seqlens, token, documents, steps)
    first_block = tl.load(first + document, mask=ok, other=0)
    position = token - tl.load(cu_seqlens + document, mask=ok, other=0)
    tl.store(own + token, first_block + position // block_size, mask=ok)
    tl.store(first_of + token, first_block, mask=ok)


@triton.jit(do_not_specialize=["blocks", "documents", "steps"])
def _block_bounds(cu_seqlens, first, bounds, blocks, documents, block_size, steps, SIZE: tl.constexpr):
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = block < blocks
    document = _document_of(first, block, documents, steps)
    stop = tl.load(cu_seqlens + document + 1, mask=ok, other=0)
    begin = tl.load(cu_seqlens + document, mask=ok, other=0)
    begin += (block - tl.load(first + document, mask=ok, other=0)) * block_size
    begin = tl.minimum(begin, stop)
    stop = tl.minimum(begin + block_size, stop)
    for part in tl.static_range(2):
        tl.store(bounds + block * 6 + part * 3, begin, mask=ok)
        tl.store(bounds + block * 6 + part * 3 + 1, stop, mask=ok)
        tl.store(bounds + block * 6 + part * 3 + 2, tl.zeros_like(block), mask=ok)


@triton.jit
def query_rows(bounds, block):
    """(first row of q, one past the last, token minus row) of a block."""
    at = bounds + block * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def key_rows(bounds, block):
    """(first row of k, one past the last, token minus row) of a block."""
    at = bounds + block * 6 + 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)
