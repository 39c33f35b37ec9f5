"""Attention to selected blocks, for any selector.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.blocks.backends import Backend, pick_backend
from moba_train.attention.blocks.spans import KeySpans
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection


@dataclass(frozen=True)
class BlockAttention:
    """Each query and head attends to its own block, causally, and to selected earlier blocks of its document.

    The selector gives block ids (geometry.py), int32 [H, T, C] with C <= 127 for the kernels: ascending, history blocks
    only, -1 behind. The own block is always attended to and not listed.
    """

    block_size: int
    scale: float
    """Factor on the scores: positive, finite."""
    backend: str
    """auto, triton, composed or reference."""
    key: str
    """YAML key of `backend`, for messages."""

    def selection(self, selected_HTC: Tensor, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """The selected blocks of the layout's queries, and what the backend keeps with them."""
        backend = self._picked(q_THD, layout, selected_HTC.shape[2])
        return (selected_HTC, *backend.block_lists(selected_HTC, layout, kv_heads, self.block_size))

    def empty_selection(self, selected: int, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """Tensors of the shapes and dtypes of `selection`'s for C = `selected`, contents undefined."""
        selected_HTC = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], selected), dtype=torch.int32)
        backend = self.pick(q_THD, layout, selected)  # not kept: sizes may be symbolic in torch.compile's tracing
        return (selected_HTC, *backend.empty_block_lists(selected_HTC, layout, kv_heads, self.block_size))

    def takes_spans(self, q_THD: Tensor, layout: Layout, selected: int) -> bool:
        """Whether `attend` takes spans for queries like these: the Triton kernels do."""
        return self._picked(q_THD, layout, selected).NAME == "triton"

    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        layout: Layout,
        selection: Selection,
        spans: KeySpans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T] over the own and the selected blocks, as far as their keys are given.

        `spans`: what each query attends to in place of its own block (`takes_spans`), none of it in a selected one.
        """
        backend = self._picked(q_THD, layout, selection[0].shape[2])
        return backend.attend(q_THD, k_SKD, v_SKD, layout, selection, **self._arguments(spans))

    def attend_backward(
        self, state: BackwardState, layout: Layout, selection: Selection, spans: KeySpans | None = None
    ) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        backend = self._picked(state.q, layout, selection[0].shape[2])
        return backend.attend_backward(state, layout, selection, **self._arguments(spans))

    def _arguments(self, spans: KeySpans | None) -> dict[str, Any]:
        sizes = {"block_size": self.block_size, "scale": self.scale}
        return sizes if spans is None else {**sizes, "spans": spans}

    def _picked(self, q_THD: Tensor, layout: Layout, selected: int) -> Backend:
        """Picked once for a layout and kept with it.

        Around a ring, `attend` meets layouts that `selection` did not, of a part of the keys: there the reference may
        take the call, whatever made the selection.
        """
        key = ("block backend", self, selected, q_THD.shape, q_THD.dtype, q_THD.device)
        return layout.cached(key, lambda: self.pick(q_THD, layout, selected))

    def pick(self, q_THD: Tensor, layout: Layout, selected: int) -> Backend:
        """The backend for queries like these, with `selected` blocks of a query besides its own."""
        return pick_backend(self.backend, self.key, q_THD, layout, block_size=self.block_size, selected=selected)
