"""Attention to the blocks that MoBA's gate selects, a softmax for each, as a LocalAttention.

Shape suffixes: T queries, t a chunk of them, S keys, N blocks, H query heads, K key/value heads, D head width,
C selected blocks of a query.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from moba_train.attention.blocks.by_unit import BlocksByUnit
from moba_train.attention.blocks.summed import SummedBlocks
from moba_train.attention.decoding import CachedKeys
from moba_train.attention.masked import accumulation_dtype, query_chunks
from moba_train.attention.merge import nothing_seen
from moba_train.attention.moba.attention import MobaAttention
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection
from moba_train.config.base import Section

NO_TRITON_SUMS = "which has no kernels for sums over blocks; allowed here: auto, composed, reference"


class SummedByUnit(BlocksByUnit):
    """One block at a time: the results are added up with their weights."""

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """(selected blocks, weights [H, T, 1 + C] of the own block and of these)."""
        assert summaries is not None
        assert isinstance(self.attention, SummedMoba)
        (units_HTC,) = super().select(q_THD, summaries, layout)
        return units_HTC, self.attention.unit_weights(units_HTC, q_THD, summaries)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s, contents undefined."""
        (units_HTC,) = super().empty_selection(q_THD, k_SKD, layout)
        heads, tokens, count = units_HTC.shape
        return units_HTC, q_THD.new_empty((heads, tokens, 1 + count), dtype=accumulation_dtype(q_THD.dtype))

    def attend_own(self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [U, H, D], lse [H, U]) over the own blocks; (0, -inf) where queries do not attend to them."""
        assert isinstance(self.attention, SummedMoba)
        return super().attend_own(q_UHD, k_UKD, v_UKD, layout) if self.attention.sums.own else nothing_seen(q_UHD)

    def attend_own_backward(self, state: BackwardState, layout: Layout) -> Gradients:
        """(dq, dk, dv) of `attend_own`."""
        assert isinstance(self.attention, SummedMoba)
        if self.attention.sums.own:
            return super().attend_own_backward(state, layout)
        wide = accumulation_dtype(state.q.dtype)
        return torch.zeros_like(state.q), torch.zeros_like(state.k, dtype=wide), torch.zeros_like(state.v, dtype=wide)


class SummedMoba(MobaAttention):
    """MoBA's gate, with the results of the own block and of the selected ones added up.

    With `gated`, the selected blocks' results are weighted by the softmax of their gates, in the units of attention's
    scaled scores; the own block, whose mean key would tell of later tokens, counts once. As the selection, the weights
    carry no gradient. Without `own`, queries do not attend to their own block.
    """

    merges = False
    decodes_full = False

    def __init__(self, options: Section, head_dim: int, *, section: str, gated: bool = False, own: bool = True) -> None:
        """Raises ValueError for a backend that has no kernels for sums. `section`: YAML path of the options."""
        super().__init__(options, head_dim, section=section)
        if self.options.backend == "triton":
            raise ValueError(f"{section}.backend: 'triton' given, {NO_TRITON_SUMS}")
        self.sums = SummedBlocks(
            self.alignment, self.scale, self.options.backend, f"{section}.backend", weighted=gated, own=own
        )

    @property
    def by_unit(self) -> SummedByUnit:
        """This attention, one block at a time."""
        return SummedByUnit(self, self.options.topk - 1)

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """The selected history blocks, their weights if the gates weigh them, and what the backend makes of them."""
        assert summaries is not None
        selected_HTC = self.select_blocks(q_THD, summaries, layout)
        assert selected_HTC is not None
        weights_HTC = self.weights(selected_HTC, q_THD, summaries) if self.sums.weighted else None
        return self.sums.selection(selected_HTC, weights_HTC, q_THD, layout, kv_heads=summaries.shape[1])

    def weights(self, selected_HTC: Tensor, q_THD: Tensor, summaries: Tensor) -> Tensor:
        """The softmax of the selected blocks' gates, [H, T, C]; 0 for slots without a block."""
        heads, queries, count = selected_HTC.shape
        weights_HTC = q_THD.new_zeros((heads, queries, count), dtype=accumulation_dtype(q_THD.dtype))
        if not count:
            return weights_HTC
        for rows in query_chunks(queries, heads * summaries.shape[0], q_THD.device):
            gates_htN = self.block_scores(q_THD[rows], summaries)  # [K, t, N] where a group selects together
            selected_HtC = selected_HTC[:, rows].long()
            gates_HtN = gates_htN.repeat_interleave(heads // gates_htN.shape[0], dim=0)
            found_HtC = gates_HtN.gather(2, selected_HtC.clamp(min=0)).masked_fill_(selected_HtC < 0, -torch.inf)
            # Queries without history have no gate at all, and a softmax of nothing but -inf is NaN.
            weights_HTC[:, rows] = found_HtC.softmax(-1).masked_fill_(selected_HtC < 0, 0.0)
        return weights_HTC

    def unit_weights(self, selected_HTC: Tensor, q_THD: Tensor, summaries: Tensor) -> Tensor:
        """The weights of the own block and of the selected ones, [H, T, 1 + C]; 0 for slots without a block."""
        if self.sums.weighted:
            weights_HTC = self.weights(selected_HTC, q_THD, summaries)
        else:
            weights_HTC = (selected_HTC >= 0).to(accumulation_dtype(q_THD.dtype))
        return F.pad(weights_HTC, (1, 0), value=float(self.sums.own))

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""
        return self.sums.empty_selection(self._count(layout), q_THD, layout, kv_heads=k_SKD.shape[1])

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the own and the selected blocks, all of whose keys are given."""
        return self.sums.attend(q_THD, k_SKD, v_SKD, layout, selection)

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        return self.sums.attend_backward(state, layout, selection)

    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each sequence, as training attends."""
        return LocalAttention.decode(self, q_BHD, cached)

    def is_dense(self, layout: Layout) -> bool:
        """Never: a sum of softmaxes is not full attention, however many blocks are selected."""
        return False
