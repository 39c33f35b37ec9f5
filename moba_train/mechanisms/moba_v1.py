"""The kind `moba_v1`: the blocks that MoBA's gate selects have a softmax each, and their results are added up.

Nothing joins by (out, lse) here: the sum over blocks is not a softmax over their keys, so all keys of a block must be
given at once (`AttentionFacts.merges`).

Shape suffixes: T queries, t a chunk of them, S keys, N blocks, H query heads, K key/value heads, D head width,
C selected blocks of a query.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moba_train.attention.facets import decode_as_trained
from moba_train.attention.kernels import composed
from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.kernels.common.merge import nothing_seen
from moba_train.attention.kernels.common.reference import (
    Mask,
    accumulation_dtype,
    masked_attend,
    masked_attend_backward,
    query_chunks,
    selected_mask,
)
from moba_train.attention.kernels.composed import BlockKernel, Join, Part, Rows
from moba_train.attention.kind import MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.moba.gate import gate_scores
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState, Gradients, Selection
from moba_train.config.attention import LayerAttention
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.dispatch.blocks_by_unit import BlocksByUnit, OffersUnits


@dataclass(frozen=True)
class WeightedSum(Join):
    """A softmax for each block; the results are added up, those of selected blocks times their weights.

    The weights carry no gradient. `lse` is the log-sum-exp over all keys here as well, though no result depends on it.
    """

    weights_HTC: Tensor | None
    """The weight of each selected block, [H, T, C]; None: all are 1, as the diagonal block's always is."""
    diagonal: bool
    """Queries attend to their diagonal block at all."""

    def attend_diagonal(
        self, blocks: BlockKernel, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over the diagonal blocks; (0, -inf) without any."""
        if self.diagonal:
            return blocks.attend_diagonal(q_THD, k_SKD, v_SKD)
        tokens, heads, _ = q_THD.shape
        lse_HT = q_THD.new_full((heads, tokens), -torch.inf, dtype=accumulation_dtype(q_THD.dtype))
        return torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device), lse_HT

    def join(
        self, part: Part, out_THD: Tensor, lse_HT: Tensor, diagonal_lse_HT: Tensor, part_ED: Tensor, part_E: Tensor
    ) -> None:
        """Join by addition."""
        part.add(out_THD, self._weighted(part, part_ED))
        part.add_lse(lse_HT, part_E)

    def diagonal_state(
        self, blocks: BlockKernel, state: BackwardState, heads: slice, kv_heads: slice
    ) -> BackwardState | None:
        """The diagonal blocks' results, computed again."""
        if not self.diagonal:
            return None
        some = state.part(heads=heads, kv_heads=kv_heads)
        out, lse = blocks.attend_diagonal(some.q, some.k, some.v)
        return some._replace(out=out, lse=lse)

    def slots_state(self, blocks: BlockKernel, part: Part, rows: Rows, k: Tensor, v: Tensor) -> BackwardState:
        """The slots' results, computed again."""
        q = part.gather(rows.q)
        out, lse = blocks.kernel.forward(q, k, v, part.segments, blocks.scale)
        dout = self._weighted(part, part.gather(rows.dout).squeeze(1)).unsqueeze(1)
        return BackwardState(dout, q, k, v, out, lse)

    def _weighted(self, part: Part, x_ED: Tensor) -> Tensor:
        """Rows of slots times their weights, in place."""
        return x_ED if self.weights_HTC is None else x_ED.mul_(part.by_slot(self.weights_HTC).unsqueeze(1))


def _times(x_THD: Tensor, weight_HT: Tensor | None) -> Tensor:
    return x_THD if weight_HT is None else x_THD * weight_HT.T.unsqueeze(-1)


NO_TRITON_SUMS = "which has no kernels for sums over blocks; allowed here: auto, composed, reference"


class SummedByUnit(BlocksByUnit):
    """One block at a time: the results are added up with their weights."""

    attention: "SummedMoba"

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """(selected blocks, weights [H, T, 1 + C] of the own block and of these)."""
        assert summaries is not None
        (units_HTC,) = super().select(q_THD, summaries, layout)
        return units_HTC, self.attention.unit_weights(units_HTC, q_THD, summaries)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s, contents undefined."""
        (units_HTC,) = super().empty_selection(q_THD, k_SKD, layout)
        heads, tokens, count = units_HTC.shape
        return units_HTC, q_THD.new_empty((heads, tokens, 1 + count), dtype=accumulation_dtype(q_THD.dtype))

    def attend_own(self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [U, H, D], lse [H, U]) over the own blocks; (0, -inf) where queries do not attend to them."""
        return super().attend_own(q_UHD, k_UKD, v_UKD, layout) if self.attention.own else nothing_seen(q_UHD)

    def attend_own_backward(self, state: BackwardState, layout: Layout) -> Gradients:
        """(dq, dk, dv) of `attend_own`."""
        if self.attention.own:
            return super().attend_own_backward(state, layout)
        wide = accumulation_dtype(state.q.dtype)
        return torch.zeros_like(state.q), torch.zeros_like(state.k, dtype=wide), torch.zeros_like(state.v, dtype=wide)


class SummedMoba(MobaAttention, OffersUnits):
    """MoBA's gate, with the results of the own block and of the selected ones added up: each has a softmax of its own.

    With `gated`, the selected blocks' results are weighted by the softmax of their gates, in the units of attention's
    scaled scores; the own block, whose mean key would tell of later tokens, counts once. As the selection, the weights
    carry no gradient. Without `own`, queries do not attend to their own block. `lse` is the log-sum-exp over all keys.
    """

    def __init__(
        self, options: MobaAttention.Options, head_dim: int, *, section: str, gated: bool = False, own: bool = True
    ) -> None:
        """Raises ValueError for a backend that has no kernels for sums. `section`: YAML path of the options."""
        super().__init__(options, head_dim, section=section)
        if self.backend == "triton":
            raise ValueError(f"{section}.backend: 'triton' given, {NO_TRITON_SUMS}")
        self.gated = gated
        self.own = own
        self.facts = self.facts._replace(merges=False)

    @property
    def by_unit(self) -> SummedByUnit:
        """This attention, one block at a time."""
        return SummedByUnit(self, self.options.history_blocks)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The selected history blocks, their float32 or float64 weights if the gates weigh them, and what `composed`
        keeps with them."""
        assert summaries is not None
        selected_HTC = self.select_blocks(q_THD, summaries, layout)
        weights = [self.weights(selected_HTC, q_THD, summaries)] if self.gated else []
        lists: Selection = ()
        if self._composes(q_THD, layout):
            lists = composed.block_lists(selected_HTC, layout, summaries.shape[1], self.block_size)
        return (selected_HTC, *weights, *lists)

    def weights(self, selected_HTC: Tensor, q_THD: Tensor, summaries: Tensor) -> Tensor:
        """The softmax of the selected blocks' gates, [H, T, C]; 0 for slots without a block."""
        heads, queries, listed = selected_HTC.shape
        weights_HTC = q_THD.new_zeros(selected_HTC.shape, dtype=accumulation_dtype(q_THD.dtype))
        if not listed:
            return weights_HTC
        for rows in query_chunks(queries, heads * summaries.shape[0], q_THD.device):
            # [K, t, N] if a group selects together
            gates_htN = gate_scores(q_THD[rows], summaries, self.options.select) * self.scale
            selected_HtC = selected_HTC[:, rows].long()
            gates_HtN = gates_htN.repeat_interleave(heads // gates_htN.shape[0], dim=0)
            found_HtC = gates_HtN.gather(2, selected_HtC.clamp(min=0)).masked_fill_(selected_HtC < 0, -torch.inf)
            # Queries without history have no gate at all, and a softmax of nothing but -inf is NaN.
            weights_HTC[:, rows] = found_HtC.softmax(-1).masked_fill_(selected_HtC < 0, 0.0)
        return weights_HTC

    def unit_weights(self, selected_HTC: Tensor, q_THD: Tensor, summaries: Tensor) -> Tensor:
        """The weights of the own block and of the selected ones, [H, T, 1 + C]; 0 for slots without a block."""
        if self.gated:
            weights_HTC = self.weights(selected_HTC, q_THD, summaries)
        else:
            weights_HTC = (selected_HTC >= 0).to(accumulation_dtype(q_THD.dtype))
        return F.pad(weights_HTC, (1, 0), value=float(self.own))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        selected_HTC = q_THD.new_empty((q_THD.shape[1], len(q_THD), self._listed(layout)), dtype=torch.int32)
        wide = accumulation_dtype(q_THD.dtype)
        weights = [selected_HTC.new_empty(selected_HTC.shape, dtype=wide)] if self.gated else []
        lists: Selection = ()
        if self._can_compose(q_THD, layout):  # not kept: sizes may be symbolic in torch.compile's tracing
            lists = composed.empty_block_lists(selected_HTC, layout, k_SKD.shape[1], self.block_size)
        return (selected_HTC, *weights, *lists)

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the own and the selected blocks, all of whose keys are given."""
        selected_HTC, join, made = self._taken_apart(selection)
        sizes: dict[str, Any] = {"block_size": self.block_size, "scale": self.scale}
        if self._composes(q_THD, layout):
            return composed.attend(q_THD, k_SKD, v_SKD, layout, made, **sizes, join=join)
        out_THD = torch.zeros(q_THD.shape, dtype=accumulation_dtype(q_THD.dtype), device=q_THD.device)
        lse_HT = out_THD.new_full((q_THD.shape[1], q_THD.shape[0]), -torch.inf)
        for mask, weight_HT in self._slots(selected_HTC, join.weights_HTC, layout):
            part_THD, part_HT = masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)
            out_THD += _times(part_THD, weight_HT)
            lse_HT = torch.logaddexp(lse_HT, part_HT)
        return out_THD.to(q_THD.dtype), lse_HT

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`; computes the results of each block again."""
        selected_HTC, join, made = self._taken_apart(selection)
        sizes: dict[str, Any] = {"block_size": self.block_size, "scale": self.scale}
        if self._composes(state.q, layout):
            return composed.attend_backward(state, layout, made, **sizes, join=join)
        _, q_THD, k_SKD, v_SKD, _, _ = state
        sums = [torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=x.device) for x in (q_THD, k_SKD, v_SKD)]
        for mask, weight_HT in self._slots(selected_HTC, join.weights_HTC, layout):
            # The state's out and lse are those of the sum; the gradient of a block's softmax needs the block's.
            out, lse = masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)
            own = state._replace(dout=_times(state.dout, weight_HT).to(q_THD.dtype), out=out, lse=lse)
            grads = masked_attend_backward(own, mask, self.scale, prefix=layout.is_whole)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q_THD, k_SKD, v_SKD), strict=True))
        return dq, dk, dv

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence, as training attends."""
        return decode_as_trained(self, q_BHD, cached)

    def is_full(self, layout: Layout) -> bool:
        """Never: a sum of softmaxes is not full attention, however many blocks are selected."""
        return False

    def _taken_apart(self, selection: Selection) -> tuple[Tensor, WeightedSum, Selection]:
        """(selected blocks, how they are joined, the selection as `composed` takes it)."""
        weights = selection[1] if self.gated else None
        return selection[0], WeightedSum(weights, self.own), (selection[0], *selection[1 + self.gated :])

    def _slots(
        self, selected_HTC: Tensor, weights_HTC: Tensor | None, layout: Layout
    ) -> Iterator[tuple[Mask, Tensor | None]]:
        """The mask and the weight of one block of each query after the other: the own one, then the selected ones."""
        if self.own:
            yield selected_mask(selected_HTC[..., :0], layout, self.block_size), None
        for slot in range(selected_HTC.shape[2]):
            mask = selected_mask(selected_HTC[..., slot : slot + 1], layout, self.block_size, diagonal=False)
            yield mask, None if weights_HTC is None else weights_HTC[..., slot]

    def _composes(self, q_THD: Tensor, layout: Layout) -> bool:
        """True if composed.py takes the call, False if the plain PyTorch above does; kept with the layout."""
        key = ("summed blocks compose", self, q_THD.shape, q_THD.dtype, q_THD.device)
        return layout.cached(key, lambda: self._can_compose(q_THD, layout))

    def _can_compose(self, q_THD: Tensor, layout: Layout) -> bool:
        if self.backend == "reference" or (self.backend == "auto" and not q_THD.is_cuda):
            return False
        refused = composed.refuses(q_THD, layout, self.block_size)
        key = self.blocks.key
        if refused and self.backend == "composed" and composed.composes(layout, self.block_size):
            raise ValueError(f"{key}: 'composed' cannot run this call: {refused}; use 'auto'")
        if refused and q_THD.is_cuda:
            slow = f"{key}: {self.backend} takes plain PyTorch, which is very much slower than the kernels"
            warnings.warn(f"{slow}: {refused}", stacklevel=2)  # shown once per place, Python's default
        return not refused


class MobaV1Kind(MobaKind):
    """MoBA whose blocks have a softmax each: their results are added up, or weighted by the gates."""

    name = "moba_v1"

    class Options(MobaAttention.Options):
        """Options of `kind: moba_v1`."""

        merge: Literal["sum", "gate", "softmax"] = Field(
            "sum",
            description="how the results of a query's blocks become one; sum: added up; gate: own block plus the "
            "mean of the others, weighted by the softmax of their gates; softmax: one softmax over all keys, as moba",
        )

    options: Options

    def __init__(self, options: Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        sums = options.merge != "softmax"
        self.facts = self.facts._replace(own_kernels=sums and options.backend == "auto")

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Problems of MoBA, and Triton kernels for sums, which do not exist."""
        assert isinstance(options, MobaV1Kind.Options)
        if options.backend == "triton" and options.merge != "softmax":
            yield f"backend: given 'triton' {context.layers} with merge: {options.merge}, {NO_TRITON_SUMS}"
            options = options.model_copy(update={"backend": "auto"})
        yield from super().problems(options, context)

    @classmethod
    def full_attention(cls, options: Section, keep_windows: bool = False) -> LayerAttention | None:
        """That of MoBA; none of blocks that have a softmax each."""
        assert isinstance(options, MobaV1Kind.Options)
        return super().full_attention(options) if options.merge == "softmax" else None

    def _attention(self) -> MobaAttention:
        merge = self.options.merge
        if merge == "softmax":
            return super()._attention()
        return SummedMoba(self.options, self.head_dim, section=f"attention.{self.name}", gated=merge == "gate")

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved are the selected block ids and their inverse lists, int32 each, and the weights by gates, float32."""
        options = self.options
        if options.merge != "softmax":  # short sequences also select
            batch = batch._replace(seq_len=max(batch.seq_len, options.topk * options.block_size + 1))
        found = super().token_bytes(model, batch)
        weights = 4 * model.heads * options.history_blocks if options.merge == "gate" else 0
        return found._replace(saved=found.saved + weights)
