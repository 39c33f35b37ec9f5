"""The rows of the packed sequence that a layer is given, and the way to the others.

A kind whose selection has parameters, or that carries states, is one program for one device, for context parallelism
and for generation: it computes with its own rows, gathers what it needs of the others, and attends to all keys.

Shape suffixes: L rows given to the layer (padding included), n tokens among them, T tokens of the sequence, R ranks,
B running sequences, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from typing import Any, NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRanges, layout_arguments
from moba_train.attention.observer import show
from moba_train.attention.operators import attention_operator
from moba_train.attention.protocol import LocalAttention


class ShardPlace(NamedTuple):
    """Place of a shard in its sequence: the rank that holds it, and the tokens of every rank."""

    rank: int
    """Number of this rank among the R that share the sequence, from 0."""
    ranges_by_rank: tuple[TokenRanges, ...]
    """Tokens of each rank, known on the host; the new ones while tokens are generated."""


class States(Protocol):
    """States of the running sequences, [B, ...], by a name that is unique in the layer's kind. B counts the layout's
    query ranges; sequences that have no state yet have zeros."""

    def get(self, name: str, /) -> Tensor | None:
        """The states of that name; None if no sequence has one."""

    def __setitem__(self, name: str, states_Bx: Tensor, /) -> None: ...


class Generation(NamedTuple):
    """Decoding mode, and states that a kind may keep from call to call, while tokens are generated."""

    attends_to_all: bool
    """True for new tokens with `decode: full`: then a kind that selects keys attends to all."""
    states: States


class Shard:
    """One layer's part of a packed sequence.

    This class is the shard of one device: the whole sequence. Under context parallelism it is the rows of a rank
    (parallel/context/engine.py); while tokens are generated, the new rows, after those that the cache holds
    (tools/inference/cache.py). All ranks must make the same calls in the same order.
    """

    generation: Generation | None = None
    """None unless tokens are being generated."""

    def __init__(self, engine: Any, layout: Layout) -> None:
        """`engine`: the `OperatorEngine` that gives it. `layout`: of the whole packed sequence."""
        self._engine = engine
        self._whole = layout

    @property
    def layout(self) -> Layout:
        """The sequence, with this layer's tokens as its queries and all tokens so far as its keys."""
        return self._whole

    @property
    def place(self) -> ShardPlace:
        """Place among the ranks that share the sequence; on one device, rank 0 of one."""
        return ShardPlace(0, (self.layout.query_ranges,))

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all tokens so far, [T, ...], from those of this layer's tokens; differentiable.

        `name` is unique in the layer's kind: while tokens are generated, the rows are kept under it.
        """
        return x_nx

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` of all ranks that share the sequence, [R, ...], in rank order; differentiable. Shapes must agree."""
        return x.unsqueeze(0)

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) of this layer's tokens over the keys of all tokens so far, by this device alone.

        `selected_HnC`: the history blocks that each query attends to, for an attention that is given them
        (facets.py); else it summarizes and selects by itself. Differentiable in q, k and v; no gradient
        passes `lse`.
        """
        if not len(q_nHD):  # a rank without tokens; its gradients must reach the others all the same
            return q_nHD + (k_TKD[:0].sum() + v_TKD[:0].sum()), q_nHD.new_empty((q_nHD.shape[1], 0))
        call = *layout_arguments(self.layout), attention.handle, self._engine.handle
        # Continues in `operators._attend`.
        out, lse, *_ = attention_operator()(q_nHD, k_TKD, v_TKD, selected_HnC, None, *call)
        show(self._engine, out, lse, q_nHD, k_TKD, v_TKD, attention, self.layout, selected_HnC, True)
        return out, lse


def attends_to_all(shard: Shard) -> bool:
    """True for new tokens that attend to all keys, whatever the kind selects (`decode: full`)."""
    return shard.generation is not None and shard.generation.attends_to_all


def own_rows(x_Lx: Tensor, shard: Shard) -> Tensor:
    """The rows that carry tokens, [n, ...], without padding: in the order of the layout's queries."""
    tokens = shard.layout.queries
    return x_Lx if len(x_Lx) == tokens else x_Lx[:tokens]  # a full slice costs its backward pass a copy


def padded(x_nx: Tensor, rows: int) -> Tensor:
    """The inverse of `own_rows`: [L, ...] for L = `rows`, zeros for padding."""
    missing = rows - len(x_nx)
    return F.pad(x_nx, (0, 0) * (x_nx.dim() - 1) + (0, missing)) if missing else x_nx
