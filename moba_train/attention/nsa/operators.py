"""What the kind `nsa` computes from the layout, and its choice of blocks, as torch operators: torch.compile keeps them
whole. Traced, what is kept with the layout would make a recomputed layer another one than the first time.

Callers give `operators.layout_arguments` in place of the layout.

Shape suffixes: n queries of the layout, N compressed blocks, H query heads, C selected blocks of a query.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_bound
from moba_train.attention.nsa.geometry import CompressedBlocks
from moba_train.attention.nsa.selection import BlockChoice
from moba_train.attention.operators import with_layout
from moba_train.attention.protocol import Layout


@torch.library.custom_op("moba_train::nsa_places", mutates_args=())
@with_layout
def places(layout: Layout, size: int, stride: int) -> tuple[Tensor, Tensor]:
    """`CompressedBlocks.places`, int64 [N] each."""
    return CompressedBlocks(size, stride).places(layout)


@places.register_fake
@partial(with_layout, traced=True)
def _(layout: Layout, size: int, stride: int) -> tuple[Tensor, Tensor]:
    like = layout.cu_seqlens.new_empty((CompressedBlocks(size, stride).bound(layout),), dtype=torch.int64)
    return like, torch.empty_like(like)


@torch.library.custom_op("moba_train::nsa_choose", mutates_args=())
@with_layout
def choose(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    layout: Layout,
    size: int,
    stride: int,
    block_size: int,
    topk: int,
    first: int,
    local: int,
    backend: str,
    scale: float,
) -> Tensor:
    """`BlockChoice.choose`: int32 [H, n, C]. Without gradient."""
    choice = BlockChoice(CompressedBlocks(size, stride), block_size, topk, first, local, backend)
    return choice.choose(q, k, lse, layout, scale)


@choose.register_fake
@partial(with_layout, traced=True)
def _(
    q: Tensor, k: Tensor, lse: Tensor, layout: Layout, size: int, stride: int, block_size: int, topk: int, *_rest: Any
) -> Tensor:
    count = min(topk - 1, block_bound(layout, block_size))
    return q.new_empty((q.shape[1], q.shape[0], count), dtype=torch.int32)
