"""How the results of a query's own block and of its selected blocks become one: a parameter of composed.py.

`OneSoftmax`  one softmax over the keys of all blocks, by online softmax (attention/merge.py)
`WeightedSum` a softmax for each block, and the results added up; it needs their (out, lse) again in the backward pass,
              which computes them anew

Shape suffixes: T queries, t a range of them, S keys, H query heads, h some of them, K key/value heads, C selected
blocks, E entries of a part, D head width.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moba_train.attention.masked import accumulation_dtype
from moba_train.attention.protocol import BackwardState
from moba_train.attention.varlen import Segments, VarlenKernel


class Part(Protocol):
    """The entries of some key/value heads, from all tokens or from a range of them, in list order."""

    @property
    def segments(self) -> Segments:
        """The lists and their blocks, the keys of each key/value head behind those of the head before."""
        ...

    def gather(self, x_rows: Tensor) -> Tensor:
        """[T * H, D] -> [E, 1, D]."""
        ...

    def gather_lse(self, lse_rows: Tensor) -> Tensor:
        """[T * H] -> [1, E]."""
        ...

    def merge(self, out_THD: Tensor, lse_HT: Tensor, own_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor) -> None:
        """Join the entries' out and lse with the own blocks', by online softmax: out in place, lse written."""
        ...

    def add(self, dq_THD: Tensor, part_ED: Tensor) -> None:
        """Add the entries' parts of dq, in place."""
        ...

    def by_entry(self, x_HTC: Tensor) -> Tensor:
        """One number for each slot of every query, [H, T, C] -> [E]."""
        ...

    def add_lse(self, lse_HT: Tensor, part_E: Tensor) -> None:
        """Add the keys of the entries to the log-sum-exp of their queries, in place."""
        ...


class Rows(NamedTuple):
    """The tensors of a backward pass that belong to queries, a row for each query and head."""

    dout: Tensor
    """[T * H, D]"""
    q: Tensor
    out: Tensor
    lse: Tensor
    """[T * H]"""

    @classmethod
    def from_state(cls, state: BackwardState) -> "Rows":
        """Those of `state`."""
        dout, q, out = (x.reshape(-1, x.shape[2]) for x in (state.dout, state.q, state.out))
        return cls(dout, q, out, state.lse.T.reshape(-1))


@dataclass(frozen=True)
class BlockKernel:
    """The kernel of a call, and the segments of its own blocks."""

    kernel: type[VarlenKernel]
    own: Segments
    scale: float

    def attend_own(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the own blocks."""
        return self.kernel.forward(q_THD, k_SKD, v_SKD, self.own, self.scale)


class Join(Protocol):
    """The steps of composed.py that depend on how results are joined."""

    def attend_own(self, blocks: BlockKernel, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) of the own blocks, to which the selected ones are joined."""
        ...

    def join(
        self, part: Part, out_THD: Tensor, lse_HT: Tensor, own_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor
    ) -> None:
        """Join the entries' out and lse to those of their queries, in place; `part_ED` may be overwritten."""
        ...

    def own_state(
        self, blocks: BlockKernel, state: BackwardState, heads: slice, kv_heads: slice
    ) -> BackwardState | None:
        """The state of the own blocks' backward pass for some heads; None: there are no own blocks."""
        ...

    def entries_state(self, blocks: BlockKernel, part: Part, rows: Rows, k: Tensor, v: Tensor) -> BackwardState:
        """The state of the entries' backward pass, with the keys and values [k * S, 1, D] of their heads."""
        ...


class OneSoftmax:
    """One softmax over the keys of the own block and the selected ones. A `Join`."""

    def attend_own(self, blocks: BlockKernel, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) over the own blocks."""
        return blocks.attend_own(q_THD, k_SKD, v_SKD)

    def join(
        self, part: Part, out_THD: Tensor, lse_HT: Tensor, own_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor
    ) -> None:
        """By online softmax."""
        part.merge(out_THD, lse_HT, own_lse_HT, part_ED, part_E)

    def own_state(self, blocks: BlockKernel, state: BackwardState, heads: slice, kv_heads: slice) -> BackwardState:
        """The results over all blocks are what the gradients through some of them need."""
        return state.with_heads(heads, kv_heads)

    def entries_state(self, blocks: BlockKernel, part: Part, rows: Rows, k: Tensor, v: Tensor) -> BackwardState:
        """The results over all blocks, a row for each entry."""
        dout, q, out = (part.gather(x) for x in (rows.dout, rows.q, rows.out))
        return BackwardState(dout, q, k, v, out, part.gather_lse(rows.lse))


ONE_SOFTMAX = OneSoftmax()


@dataclass(frozen=True)
class WeightedSum:
    """A softmax for each block; the results are added up, those of selected blocks times their weights. A `Join`.

    The weights carry no gradient. `lse` is the log-sum-exp over all keys here, too, though no result depends on it.
    """

    weights_HTC: Tensor | None
    """The weight of each selected block, [H, T, C]; None: all are 1, as the own block's always is."""
    own: bool
    """Whether queries attend to their own block at all."""

    def attend_own(self, blocks: BlockKernel, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) over the own blocks; (0, -inf) without any."""
        if self.own:
            return blocks.attend_own(q_THD, k_SKD, v_SKD)
        tokens, heads, _ = q_THD.shape
        lse_HT = q_THD.new_full((heads, tokens), -torch.inf, dtype=accumulation_dtype(q_THD.dtype))
        return torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device), lse_HT

    def join(
        self, part: Part, out_THD: Tensor, lse_HT: Tensor, own_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor
    ) -> None:
        """By addition."""
        part.add(out_THD, self._weighted(part, part_ED))
        part.add_lse(lse_HT, part_E)

    def own_state(
        self, blocks: BlockKernel, state: BackwardState, heads: slice, kv_heads: slice
    ) -> BackwardState | None:
        """The own blocks' results, computed anew."""
        if not self.own:
            return None
        some = state.with_heads(heads, kv_heads)
        out, lse = blocks.attend_own(some.q, some.k, some.v)
        return some._replace(out=out, lse=lse)

    def entries_state(self, blocks: BlockKernel, part: Part, rows: Rows, k: Tensor, v: Tensor) -> BackwardState:
        """The entries' results, computed anew."""
        q = part.gather(rows.q)
        out, lse = blocks.kernel.forward(q, k, v, part.segments, blocks.scale)
        dout = self._weighted(part, part.gather(rows.dout).squeeze(1)).unsqueeze(1)
        return BackwardState(dout, q, k, v, out, lse)

    def _weighted(self, part: Part, x_ED: Tensor) -> Tensor:
        """Rows of entries times their weights, in place."""
        return x_ED if self.weights_HTC is None else x_ED.mul_(part.by_entry(self.weights_HTC).unsqueeze(1))
