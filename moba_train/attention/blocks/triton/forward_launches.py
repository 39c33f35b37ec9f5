"""The launches of forward_pass.py: attention to long blocks by warps that have roles, on Hopper.

Tiles have the shape of those of the kernels in Triton (`TileShapes.forward`), so both work from the same tables.
"""

from typing import Any

import torch
from torch import Tensor

from moba_train.attention.blocks.triton.bulk_copies import descriptor
from moba_train.attention.blocks.triton.call import BlockCall
from moba_train.attention.blocks.triton.forward_pass import attend_history, attend_own
from moba_train.attention.blocks.triton.launch import launch
from moba_train.attention.blocks.triton.lists import BlockLists
from moba_train.attention.blocks.triton.tile_tables import TileTable
from moba_train.attention.blocks.triton.tiles import WorkRange

STAGES = {"K_STAGES": 2, "V_STAGES": 2, "Q_STAGES": 2}
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Registers of a thread, before the warps divide them: eight warps that multiply have 224, four that copy 56."""


def history(
    call: BlockCall, lists: BlockLists, work: WorkRange, table: TileTable, partial_out: Tensor, partial_lse: Tensor
) -> None:
    """The partial results of a work range's entries, in their order."""
    launch(
        attend_history,
        (_programs(call, table.bound),),
        call.q_THD,
        *_keys_and_values(call),
        partial_out,
        partial_lse,
        *call.in_lists(lists, table),
        call.heads,
        work.kv_heads.start,
        work.first_entry,
        work.entries,
        call.q_THD.stride(0),
        call.scale_log2,
        C=call.selected,
        BLOCK=call.block_size,
        **_sizes(call),
    )


def own(call: BlockCall, out_THD: Tensor, lse_HT: Tensor) -> None:
    """out [T, H, D] and lse [H, T] of the own blocks."""
    row_tiles = call.own_tiles(call.shapes.forward)
    launch(
        attend_own,
        (_programs(call, call.tables.blocks * row_tiles * call.kv_heads),),
        call.q_THD,
        *_keys_and_values(call),
        out_THD,
        lse_HT,
        call.tables.bounds,
        call.tables.blocks,
        row_tiles,
        call.heads,
        call.tokens,
        call.q_THD.stride(0),
        call.scale_log2,
        **_sizes(call),
    )


def _programs(call: BlockCall, tiles: int) -> int:
    """One for each multiprocessor, if there are tiles for all of them."""
    return min(tiles, torch.cuda.get_device_properties(call.q_THD.device).multi_processor_count)


def _keys_and_values(call: BlockCall) -> tuple[Any, Any]:
    keys = call.shapes.forward.keys
    return descriptor(call.k_SKD, keys), descriptor(call.v_SKD, keys)


def _sizes(call: BlockCall) -> dict[str, int]:
    """Compile-time sizes of both kernels, and how they are compiled."""
    return {"G": call.group, "M": call.shapes.forward.rows, **STAGES, **OPTIONS}
