"""The sizes of one call of the kernels, and the launches that its passes share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.kernels.common import softmax
from moba_train.attention.kernels.common.geometry import KeySpans
from moba_train.attention.kernels.common.launch import ceil_div, launch
from moba_train.attention.kernels.common.lists import BlockLists, BlockTables, block_tables
from moba_train.attention.kernels.common.tiles import (
    TileShape,
    TileShapes,
    TileTable,
    WorkRange,
    shared_memory_of,
    tile_shapes,
)
from moba_train.attention.kernels.table import Facts, kernel_for
from moba_train.attention.layout import Layout

# Kernels take exponentials as exp2, one instruction on the GPU; scores are scaled by log2(e) with the softmax scale.
_LOG2_E = 1.4426950408889634
_COMBINE_ROWS = 32
_PREPARE_ROWS = 32
# Keys of a program that adds splits: [16, D] of float32 for dk and dv stay in registers.
_SUMMED_KEYS = 16
_ONE_HEAD = 2**29
"""Bytes of one key/value head's partial results up to which its queries are not cut into ranges: these cost launches,
and sums in float32."""


@dataclass(frozen=True)
class BlockCall:
    """Tensors as kernels need them, tables, tile shapes; the launches that both passes share."""

    q_THD: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    selected_HTC: Tensor
    layout: Layout
    tables: BlockTables
    shapes: TileShapes
    block_size: int
    scale: float
    spans: KeySpans | None = None
    """Keys that queries attend to instead of their diagonal block; None: the diagonal block."""

    @classmethod
    def from_tensors(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        selected_HTC: Tensor,
        block_size: int,
        scale: float,
        spans: KeySpans | None = None,
    ) -> "BlockCall":
        """Copies tensors whose heads do not lie side by side; builds the tables once for a layout."""
        tables = block_tables(layout, block_size)
        shapes = tile_shapes(q.shape[-1], block_size, shared_memory_of(q.device))
        q, k, v = (heads_side_by_side(x) for x in (q, k, v))
        return cls(q, k, v, selected_HTC, layout, tables, shapes, block_size, scale, spans)

    @property
    def history_blocks(self) -> int:
        """Blocks that a query selects before its diagonal block: topk - 1, or all if a document has fewer."""
        return self.selected_HTC.shape[2]

    @property
    def partial(self) -> bool:
        """True if k and v are a part of the sequence's keys."""
        return self.layout.k_ranges is not None

    @property
    def forward_pass(self) -> str:
        """File of the kernels that attend to these blocks (table.py)."""
        return self._file("forward")

    @property
    def backward_pass(self) -> str:
        """File of the kernels that make the gradients (table.py)."""
        return self._file("backward")

    def _file(self, does: str) -> str:
        """File of the table's row, which is looked up once for a layout: a look-up takes the host 20 us."""
        q, sizes = self.q_THD, (self.block_size, self.history_blocks)
        # Sizes are part of the key, as layers of several kinds share a layout.
        key = (does, *sizes, self.head_dim, q.dtype, q.device)
        return self.layout.cached(key, lambda: kernel_for(does, Facts.from_call(q, self.layout, *sizes)).file)

    @property
    def limit(self) -> int:
        """Partial results in memory at once, at most: two for every query and head, or more where a key/value head has
        more and they are small."""
        # At 1M tokens 4096/12 the partial results of all queries together would be 92 GB
        # (docs/explanation/kernels.md, "What it costs").
        of_a_head = self.tokens * self.group * self.history_blocks
        small = _ONE_HEAD // (self.head_dim * self.q_THD.element_size())
        return max(2 * self.tokens * self.heads, min(of_a_head, small))

    @property
    def longest(self) -> int:
        """Tokens of a block, at most."""
        return min(self.block_size, self.layout.max_seqlen)

    @property
    def tokens(self) -> int:
        return self.q_THD.shape[0]

    @property
    def heads(self) -> int:
        return self.q_THD.shape[1]

    @property
    def head_dim(self) -> int:
        return self.q_THD.shape[2]

    @property
    def kv_heads(self) -> int:
        return self.k_SKD.shape[1]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale_log2(self) -> float:
        """`scale` for scores in units of log 2."""
        return self.scale * _LOG2_E

    def sizes(self, shape: TileShape) -> dict[str, Any]:
        """Compile-time sizes of a kernel over tiles of this shape."""
        tile = {"M": shape.rows, "N": shape.keys, "num_warps": shape.warps, "num_stages": shape.stages}
        return {"G": self.group, "D": self.head_dim, **tile}

    def like_q(self) -> Tensor:
        """Uninitialised, contiguous, with q's shape and dtype."""
        return torch.empty(self.q_THD.shape, dtype=self.q_THD.dtype, device=self.q_THD.device)

    def like_k(self) -> Tensor:
        """Uninitialised, contiguous, with k's shape and dtype."""
        return torch.empty(self.k_SKD.shape, dtype=self.k_SKD.dtype, device=self.k_SKD.device)

    def descriptors(self, keys: int) -> dict[str, TensorDescriptor]:
        """K and V for bulk copies of [keys, D]; what lies past the end reads as zero."""
        return {"k_desc": self.descriptor(self.k_SKD, keys), "v_desc": self.descriptor(self.v_SKD, keys)}

    def descriptor(self, x: Tensor, rows: int) -> TensorDescriptor:
        """[tokens, heads, D] for bulk copies of `rows` tokens of one head."""
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [token_stride(x), 1], [rows, self.head_dim])

    def in_lists(self, lists: BlockLists, table: TileTable, work: WorkRange) -> dict[str, Any]:
        """The arguments by which a kernel over the tiles of a work range finds its rows and its block."""
        return {
            "slots": lists.slots,
            "list_of_tile": table.list_of_tile,
            "last_tile": table.last_tile,
            "begin": table.begin,
            "end": table.end,
            "lists": table.lists,
            "blocks": self.tables.blocks,
            "first_kv_head": work.kv_heads.start,
            "first_slot": work.first_slot,
            "head_slots": work.slots,
        }

    def diagonal_tiles(self, shape: TileShape) -> int:
        """Row tiles of a diagonal block, at most."""
        return ceil_div(self.longest * self.group, shape.rows)

    def buffer(self, parts: list[WorkRange]) -> Tensor:
        """Memory for the partial results of any of these work ranges: [slots, D]."""
        slots = max(part.heads * part.slots for part in parts)
        return torch.empty(slots, self.head_dim, dtype=self.q_THD.dtype, device=self.q_THD.device)

    def stats(self, dout_THD: Tensor, out_THD: Tensor, lse_HT: Tensor) -> Tensor:
        """float32 [T, H, 2]: what `softmax.prepare` computes of each row; dout contiguous."""
        rows = self.tokens * self.heads
        stats_TH2 = torch.empty(self.tokens, self.heads, 2, dtype=torch.float32, device=self.q_THD.device)
        launch(
            softmax.prepare,
            (ceil_div(rows, _PREPARE_ROWS),),
            dout=dout_THD,
            # The kernel computes addresses from sizes alone.
            out=out_THD.contiguous(),
            lse=lse_HT.contiguous(),
            stats=stats_TH2,
            rows=rows,
            tokens=self.tokens,
            heads=self.heads,
            D=self.head_dim,
            M=_PREPARE_ROWS,
        )
        return stats_TH2

    def combine(self, kernel: Any, work: WorkRange, *, position_of: Tensor | None = None, **tensors: Tensor) -> None:
        """Join the partial results of a work range into the tensors that hold the diagonal blocks' part.

        Partial results are in the order of the slots, or at `position_of` each slot (int32).
        """
        row_slots = self.group * self.history_blocks
        first = work.first_slot // row_slots
        tokens = work.slots // row_slots
        launch(
            kernel,
            (ceil_div(tokens * self.group, _COMBINE_ROWS), work.heads),
            **tensors,
            position_of=self.selected_HTC if position_of is None else position_of,
            selected=self.selected_HTC,
            bounds=self.tables.bounds,
            tokens=self.tokens,
            first_token=first,
            last_token=first + tokens,
            first_kv_head=work.kv_heads.start,
            heads=self.heads,
            PARTIAL=self.partial,
            INDIRECT=position_of is not None,
            G=self.group,
            HISTORY=self.history_blocks,
            D=self.head_dim,
            M=_COMBINE_ROWS,
        )

    def add_splits(
        self,
        table: TileTable,
        first_kv_head: int,
        sums: tuple[Tensor, Tensor],
        parts: tuple[Tensor, Tensor],
        keys: int,
        diagonal: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Write dk and dv of a work range to `sums` [S, K, D], from the `parts` of its splits [splits * keys, D].

        With the `diagonal` blocks' dk and dv [S, some K, D], of every list; without, of lists of several splits.
        """
        launch(
            softmax.sum_splits,
            (table.lists, ceil_div(self.longest, _SUMMED_KEYS)),
            dk=sums[0],
            dv=sums[1],
            diagonal_dk=(diagonal or sums)[0],
            diagonal_dv=(diagonal or sums)[1],
            part_dk=parts[0],
            part_dv=parts[1],
            first_split=table.first_split,
            splits_of=table.splits,
            bounds=self.tables.bounds,
            blocks=self.tables.blocks,
            first_kv_head=first_kv_head,
            kv_heads=sums[0].shape[1],
            diagonal_heads=diagonal[0].shape[1] if diagonal else 0,
            ADD=diagonal is not None,
            D=self.head_dim,
            N=keys,
            KEYS=_SUMMED_KEYS,
        )


def token_stride(x: Tensor) -> int:
    """Elements from a row of x to the next; those of a row lie side by side."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1:].numel()


def heads_side_by_side(x: Tensor) -> Tensor:
    """[tokens, heads, D] with the heads of a token contiguous and tokens 16 bytes aligned, as bulk copies need it."""
    side_by_side = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    aligned = token_stride(x) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if side_by_side and aligned:
        return x
    # A bulk copy needs a base address and a row stride of whole 16 bytes (CUDA's tensor maps).
    return x.clone(memory_format=torch.contiguous_format)
