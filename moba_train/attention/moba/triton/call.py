"""The sizes of one call of the kernels, and the launches that its passes share."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moba_train.attention.moba.triton import backward
from moba_train.attention.moba.triton.lists import Lists
from moba_train.attention.moba.triton.tables import BlockTables, block_tables
from moba_train.attention.moba.triton.tiles import Segment, Shape, Shapes, TileTable, shapes
from moba_train.attention.protocol import Layout

LOG2_E = 1.4426950408889634
_COMBINE_ROWS = 32
_PREPARE_ROWS = 32


@dataclass(frozen=True)
class Call:
    """Tensors as kernels need them, tables, tile shapes; the launches that both passes share."""

    q_THD: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    chosen_HTC: Tensor
    layout: Layout
    tables: BlockTables
    shapes: Shapes
    block_size: int
    scale: float

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, layout: Layout, chosen_HTC: Tensor, block_size: int, scale: float
    ) -> "Call":
        tables, tile_shapes = block_tables(layout, block_size), shapes(q.shape[-1], block_size)
        q, k, v = (heads_side_by_side(x) for x in (q, k, v))
        return cls(q, k, v, chosen_HTC, layout, tables, tile_shapes, block_size, scale)

    @property
    def choices(self) -> int:
        return self.chosen_HTC.shape[2]

    @property
    def partial(self) -> bool:
        """Whether k and v are a part of the keys."""
        return self.layout.k_runs is not None

    @property
    def limit(self) -> int:
        """Partial results at once: twice as many as there are queries and heads."""
        return 2 * self.tokens * self.heads

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

    def sizes(self, shape: Shape) -> dict[str, Any]:
        """Compile-time sizes of a kernel over tiles of this shape."""
        tile = {"M": shape.rows, "N": shape.keys, "num_warps": shape.warps, "num_stages": shape.stages}
        return {"G": self.group, "D": self.head_dim, **tile}

    def like_q(self) -> Tensor:
        """Uninitialised, contiguous."""
        return torch.empty(self.q_THD.shape, dtype=self.q_THD.dtype, device=self.q_THD.device)

    def like_k(self) -> Tensor:
        """The same of the keys."""
        return torch.empty(self.k_SKD.shape, dtype=self.k_SKD.dtype, device=self.k_SKD.device)

    def descriptors(self, keys: int) -> tuple[TensorDescriptor, TensorDescriptor]:
        """K and V for bulk copies of [keys, D]; what lies past the end reads as zero."""
        return self.descriptor(self.k_SKD, keys), self.descriptor(self.v_SKD, keys)

    def descriptor(self, x: Tensor, many: int) -> TensorDescriptor:
        """[tokens, heads, D] for bulk copies of `many` tokens of one head."""
        return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [_token_stride(x), 1], [many, self.head_dim])

    def in_lists(self, lists: Lists, table: TileTable) -> tuple[Any, ...]:
        """What a kernel over the tiles of some lists needs to find its rows and its block."""
        return lists.entries, *table.arguments, self.tables.bounds, table.begin.numel(), self.tables.blocks

    def own_tiles(self, shape: Shape) -> int:
        """Row tiles of a block's own rows, at most."""
        return triton.cdiv(self.longest * self.group, shape.rows)

    def buffer(self, parts: list[Segment]) -> Tensor:
        """Room for the partial results of any of these segments: [entries, D]."""
        entries = max(part.heads * part.entries for part in parts)
        return torch.empty(entries, self.head_dim, dtype=self.q_THD.dtype, device=self.q_THD.device)

    def stats(self, dout_THD: Tensor, out_THD: Tensor, lse_HT: Tensor) -> Tensor:
        """float32 [T, H, 2] of `backward.prepare`; dout contiguous."""
        many = self.tokens * self.heads
        stats_TH2 = torch.empty(self.tokens, self.heads, 2, dtype=torch.float32, device=self.q_THD.device)
        backward.prepare[(triton.cdiv(many, _PREPARE_ROWS),)](
            dout_THD,
            out_THD.contiguous(),
            lse_HT.contiguous(),
            stats_TH2,
            many,
            self.tokens,
            self.heads,
            D=self.head_dim,
            M=_PREPARE_ROWS,
        )
        return stats_TH2

    def combine(self, kernel: Any, segment: Segment, *tensors: Tensor, place: Tensor | None = None) -> None:
        """Join a segment's partial results into the tensors that hold the own blocks' part.

        They stand in the order of the entries, or where `place` (int32, of each entry) says.
        """
        row_entries = self.group * self.choices
        first, tokens = segment.first_entry // row_entries, segment.entries // row_entries
        kernel[(triton.cdiv(tokens * self.group, _COMBINE_ROWS), segment.heads)](
            *tensors,
            self.chosen_HTC if place is None else place,
            self.chosen_HTC,
            self.tables.bounds,
            self.tokens,
            first,
            first + tokens,
            segment.kv_heads.start,
            self.heads,
            PARTIAL=self.partial,
            PLACED=place is not None,
            G=self.group,
            C=self.choices,
            D=self.head_dim,
            M=_COMBINE_ROWS,
        )


def _token_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def heads_side_by_side(x: Tensor) -> Tensor:
    """[tokens, heads, D] with the heads of a token contiguous and tokens 16 bytes aligned, as bulk copies need it."""
    beside = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    aligned = _token_stride(x) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if beside and aligned:
        return x
    return x.clone(memory_format=torch.contiguous_format)
