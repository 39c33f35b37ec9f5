"""Which block each token is in, and where each block lies: computed on the device, once per layout."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moba_train.attention.moba.blocks import block_bound, first_blocks
from moba_train.attention.protocol import Layout


@dataclass(frozen=True)
class BlockTables:
    """Everything kernels need to know about documents and blocks."""

    blocks: int
    """Upper bound of the number of blocks, known on the host."""
    own_T: Tensor
    """int32 [T]: each token's block."""
    first_T: Tensor
    """int32 [T]: the first block of each token's document."""
    start_N: Tensor
    """int32 [blocks]: each block's first token."""
    end_N: Tensor
    """int32 [blocks]: one past its last token; start = end for ids that name no block."""


def block_tables(layout: Layout, block_size: int) -> BlockTables:
    """The tables of the whole packed sequence; kept with the layout, which all layers of a model share."""
    key = ("moba block tables", block_size)
    if key not in layout.cache:
        layout.cache[key] = _build(layout, block_size)
    tables = layout.cache[key]
    assert isinstance(tables, BlockTables)
    return tables


def _build(layout: Layout, block_size: int) -> BlockTables:
    blocks, tokens = block_bound(layout, block_size), layout.total
    device, documents = layout.cu_seqlens.device, layout.cu_seqlens.numel() - 1
    first = first_blocks(layout.cu_seqlens, block_size).to(torch.int32)
    own_T, first_T = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    start_N, end_N = (torch.empty(blocks, dtype=torch.int32, device=device) for _ in range(2))
    steps = documents.bit_length()
    size = 256
    if tokens:
        _token_tables[(triton.cdiv(tokens, size),)](
            layout.cu_seqlens, first, own_T, first_T, tokens, documents, block_size, steps, SIZE=size
        )
    if blocks:
        _block_bounds[(triton.cdiv(blocks, size),)](
            layout.cu_seqlens, first, start_N, end_N, blocks, documents, block_size, steps, SIZE=size
        )
    return BlockTables(blocks, own_T, first_T, start_N, end_N)


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
def _block_bounds(cu_seqlens, first, start, end, blocks, documents, block_size, steps, SIZE: tl.constexpr):
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    ok = block < blocks
    document = _document_of(first, block, documents, steps)
    stop = tl.load(cu_seqlens + document + 1, mask=ok, other=0)
    begin = tl.load(cu_seqlens + document, mask=ok, other=0)
    begin += (block - tl.load(first + document, mask=ok, other=0)) * block_size
    begin = tl.minimum(begin, stop)
    tl.store(start + block, begin, mask=ok)
    tl.store(end + block, tl.minimum(begin + block_size, stop), mask=ok)
