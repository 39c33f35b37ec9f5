"""MoBA by FlexAttention: a block mask made from a selection, and the work that its tiles need.

FlexAttention skips a tile of 128 queries by 128 keys if no query of the tile sees a key of it. MoBA's queries select
one by one, so that a tile of queries needs the union of what its queries have selected.

Shape suffixes: T tokens, N blocks, H query heads, C selected blocks, Q and K tiles of queries and of keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.attention_rows import Case

TILE = 128
"""Queries and keys of a tile: FlexAttention's default."""


def fits(case: Case) -> bool:
    """True for one document of whole blocks, each of whole tiles."""
    return not (case.documents or case.block_size % TILE or case.tokens % case.block_size)


def sees_blocks(selected_HTC: Tensor, block_size: int) -> Tensor:
    """bool [H, T, N]: the earlier blocks that each query has selected (-1: none) in one document of whole blocks."""
    heads, tokens, _ = selected_HTC.shape
    blocks = tokens // block_size
    seen_HTN = torch.zeros(heads, tokens, blocks + 1, dtype=torch.bool, device=selected_HTC.device)
    seen_HTN.scatter_(2, selected_HTC.long().where(selected_HTC >= 0, blocks), True)
    return seen_HTN[..., :blocks]


class Tiles(NamedTuple):
    """Tiles of the mask, bool [H, Q, K]: a kernel skips what is in neither."""

    partial_HQK: Tensor
    """Some of the tile's pairs are seen: the mask is asked for each."""
    full_HQK: Tensor
    """All of them are."""

    def pairs_computed(self) -> int:
        """Pairs of a query and a key, of all heads, that are multiplied."""
        return int((self.partial_HQK | self.full_HQK).sum()) * TILE**2


def tiles(seen_HTN: Tensor, block_size: int) -> Tiles:
    """The tiles of `sees_blocks` and of the own, causal blocks. Blocks are whole tiles long."""
    by_tile_HQTN = seen_HTN.unflatten(1, (-1, TILE))
    tile = torch.arange(seen_HTN.shape[1] // TILE, device=seen_HTN.device)
    block = tile // (block_size // TILE)
    own_QK = block[:, None] == block
    some_HQK = by_tile_HQTN.any(2)[..., block]
    all_HQK = by_tile_HQTN.all(2)[..., block] | (own_QK & (tile[:, None] > tile))
    return Tiles((some_HQK & ~all_HQK) | torch.diag(torch.ones_like(tile, dtype=torch.bool)), all_HQK)


def block_mask(selected_HTC: Tensor, block_size: int) -> BlockMask:
    """The mask for `flex_attention` that sees exactly what MoBA with this selection attends to."""
    seen_HTN = sees_blocks(selected_HTC, block_size)

    def sees(_batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = query // block_size == key // block_size
        return (key <= query) & (own | seen_HTN[head, query, key // block_size])

    partial, full = (_lists(tiles_HQK) for tiles_HQK in tiles(seen_HTN, block_size))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=sees)


def _lists(tiles_HQK: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [1, H, Q] of the tiles of keys of each tile of queries, and the tiles [1, H, Q, K], these first."""
    order_HQK = tiles_HQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles_HQK.sum(-1, dtype=torch.int32)[None], order_HQK.int()[None]
