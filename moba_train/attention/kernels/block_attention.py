"""Attention to selected blocks, for any selector, by one of three backends.

A backend is a module with the functions of `Backend`: common/reference.py, composed.py and triton/backend.py. table.py
says which of them a stage takes; a batch that the first cannot do goes to the next.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C history blocks of a query.
"""

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from moba_train.attention.kernels import composed
from moba_train.attention.kernels.common import reference
from moba_train.attention.kernels.common.geometry import KeySpans, ranges_problem
from moba_train.attention.kernels.table import Facts, resolve_backend
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """The functions of a backend's module. Shapes and dtypes are those of `LocalAttention`.

    `selected` is int32 [H, T, C]: ascending ids of history blocks, -1 behind. A selection is (selected, *block lists).
    """

    NAME: str
    """Its value in YAML."""

    def block_lists(self, selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
        """Tensors kept with the selected blocks for `attend` and `attend_backward`; often none."""
        ...

    def empty_block_lists(self, selected_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Selection:
        """Tensors of the shapes and dtypes of `block_lists`'s, contents undefined."""
        ...

    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        layout: Layout,
        selection: Selection,
        *,
        block_size: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """(out, lse) over the diagonal block, causally, and the selected ones."""
        ...

    def attend_backward(
        self, state: BackwardState, layout: Layout, selection: Selection, *, block_size: int, scale: float
    ) -> Gradients:
        """(dq, dk, dv)."""
        ...


def _backend(name: str) -> Backend:
    """The module of a backend; the Triton kernels are imported at the first use."""
    if name == "triton":
        from moba_train.attention.kernels.triton import backend

        return cast(Backend, backend)
    return cast(Backend, composed if name == "composed" else reference)


def _batch_problem(name: str, q_THD: Tensor, layout: Layout, block_size: int) -> str:
    """The reason why a backend of the order cannot do this batch; empty if it can."""
    if name == "triton":
        return ranges_problem(layout, block_size)
    return composed.refuses(q_THD, layout, block_size) if name == "composed" else ""


@cache
def _log_once(message: str) -> None:
    logger.info(message)


class HeadsSelection(NamedTuple):
    """The selection of some query heads, their key/value heads, and the spans that `BlockAttention.attend` takes."""

    heads: slice
    kv_heads: slice
    selection: Selection
    spans: KeySpans | None = None


@dataclass(frozen=True)
class BlockAttention:
    """Each query and head attends to its diagonal block, causally, and to selected earlier blocks of its document.

    The selector gives block ids (geometry.py), int32 [H, T, C] with C <= 127 for the kernels: ascending, history blocks
    only, -1 behind. The diagonal block is always attended to and not listed.
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

    def empty_selection(self, history_blocks: int, q_THD: Tensor, layout: Layout, kv_heads: int) -> Selection:
        """Tensors of the shapes and dtypes of `selection`'s for C = `history_blocks`, contents undefined."""
        selected_HTC = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], history_blocks), dtype=torch.int32)
        # Not kept with the layout: in torch.compile's tracing sizes may be symbols, which no cache takes as keys.
        backend = self.pick(q_THD, layout, history_blocks)
        return (selected_HTC, *backend.empty_block_lists(selected_HTC, layout, kv_heads, self.block_size))

    def takes_spans(self, q_THD: Tensor, layout: Layout, history_blocks: int) -> bool:
        """True if `attend` takes spans for queries like these: the Triton kernels do."""
        return self._picked(q_THD, layout, history_blocks).NAME == "triton"

    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        layout: Layout,
        selection: Selection,
        spans: KeySpans | None = None,
    ) -> tuple[Tensor, Tensor]:
        """out [T, H, D] and lse [H, T] over the diagonal and the selected blocks, as far as their keys are given.

        `spans`: the keys that each query attends to instead of its diagonal block (`takes_spans`), none of it in a
        selected one.
        """
        backend = self._picked(q_THD, layout, selection[0].shape[2])
        return backend.attend(q_THD, k_SKD, v_SKD, layout, selection, **self._arguments(spans))

    def attend_backward(
        self, state: BackwardState, layout: Layout, selection: Selection, spans: KeySpans | None = None
    ) -> Gradients:
        """(dq, dk, dv) of `attend`."""
        backend = self._picked(state.q, layout, selection[0].shape[2])
        return backend.attend_backward(state, layout, selection, **self._arguments(spans))

    def attend_in_parts(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, parts: Iterable[HeadsSelection]
    ) -> tuple[Tensor, Tensor]:
        """`attend` of some heads after the others; `parts` have all heads."""
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        lse_HT = q_THD.new_empty(q_THD.shape[1::-1], dtype=reference.accumulation_dtype(q_THD.dtype))
        for of, kv, selection, spans in parts:
            # Without a name: a part's results must not stay in memory while the next part is computed.
            out_THD[:, of], lse_HT[of] = self.attend(q_THD[:, of], k_SKD[:, kv], v_SKD[:, kv], layout, selection, spans)
        return out_THD, lse_HT

    def attend_backward_in_parts(
        self, state: BackwardState, layout: Layout, parts: Iterable[HeadsSelection]
    ) -> Gradients:
        """(dq, dk, dv) of `attend_in_parts`."""
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (state.q, state.k, state.v))
        for of, kv, selection, spans in parts:
            some = state.part(heads=of, kv_heads=kv)
            dq[:, of], dk[:, kv], dv[:, kv] = self.attend_backward(some, layout, selection, spans)
        return dq, dk, dv

    def _arguments(self, spans: KeySpans | None) -> dict[str, Any]:
        sizes = {"block_size": self.block_size, "scale": self.scale}
        return sizes if spans is None else {**sizes, "spans": spans}

    def _picked(self, q_THD: Tensor, layout: Layout, history_blocks: int) -> Backend:
        """Picked once for a layout and kept with it.

        Around a ring, `attend` meets layouts that `selection` did not, of a part of the keys: there the reference may
        take the call, whatever made the selection.
        """
        # Kept with the layout, as a look at table and packages in every call of every layer would take the host 20 us
        # each.
        key = ("block backend", self, history_blocks, q_THD.shape, q_THD.dtype, q_THD.device)
        return layout.cached(key, lambda: self.pick(q_THD, layout, history_blocks))

    def pick(self, q_THD: Tensor, layout: Layout, history_blocks: int) -> Backend:
        """The backend for queries like these, which select at most `history_blocks` before their diagonal block.

        Raises ValueError, with the YAML key, if the wanted one cannot do the call. What `auto` takes is logged once.
        """
        facts = Facts.from_call(q_THD, layout, self.block_size, history_blocks)
        choice = resolve_backend(self.key, self.backend, facts)
        reasons = []
        for name in choice.order:
            if not (reason := _batch_problem(name, q_THD, layout, self.block_size)):
                break
            reasons.append(reason)
            # The composition of a part of the keys, as a ring gives it, goes to the reference, also where it is wanted.
            if self.backend == name and (name != "composed" or composed.composes(layout, self.block_size)):
                raise ValueError(f"{self.key}: {name!r} cannot do this batch: {reason}; use 'auto'")
        if self.backend == "auto" and name != "reference":
            _log_once(f"{self.key}: auto takes {name}, {choice.why}")
        elif self.backend == "auto" and q_THD.is_cuda:
            slow = f"{self.key}: auto takes plain PyTorch, which is very much slower than the kernels"
            # shown once for this line, Python's default
            warnings.warn(f"{slow}: {'; '.join(reasons) or choice.why}", stacklevel=2)
        return _backend(name)
