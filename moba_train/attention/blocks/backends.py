"""The backends of attention to selected blocks, and which one a call gets.

A backend is a module with the functions of `Backend`: reference.py, composed.py and triton/attention.py.
"""

import logging
import math
import warnings
from functools import cache
from typing import Protocol, cast

from torch import Tensor

from moba_train.attention.blocks import composed, reference
from moba_train.attention.blocks.available import triton_block_size, triton_refuses
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection

logger = logging.getLogger(__name__)

_COMPOSED_PAYS_FROM = {"flash-attn-4": 2048}
"""Block size from which `composed` on a varlen kernel of this name beats `triton` (benchmarks/LOG.md)."""
_COMPOSED_ROWS = 2**21
"""Query rows (tokens x heads) from which its partial results are small compared with what dense attention takes."""
_COMPOSED_ROWS_OF_A_SHARD = 2**19
"""The fewest query rows that it was measured with in a shard, where all keys are in memory anyway."""


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
        """(out, lse) over the own block, causally, and the selected ones."""
        ...

    def attend_backward(
        self, state: BackwardState, layout: Layout, selection: Selection, *, block_size: int, scale: float
    ) -> Gradients:
        """(dq, dk, dv)."""
        ...


def pick_backend(wanted: str, key: str, q_THD: Tensor, layout: Layout, *, block_size: int, selected: int) -> Backend:
    """The backend `wanted`, or the best one for `auto`; what `composed` cannot compose goes to the reference.

    `key`: YAML key of `wanted`, for messages; `selected`: blocks of a query besides its own, at most. Raises ValueError
    when the wanted backend cannot do the call. What `auto` picks, and why, is logged once.
    """
    if wanted == "reference" or (wanted == "composed" and not composed.composes(layout, block_size)):
        return cast(Backend, reference)
    no_composed = composed.refuses(q_THD, layout, block_size) if wanted == "composed" else ""
    no_triton = _triton_refuses(q_THD, layout, block_size, selected) if wanted == "triton" else ""
    if reason := no_composed or no_triton:
        raise ValueError(f"{key}: {wanted!r} cannot run this call: {reason}; use 'auto'")
    name = _best(key, q_THD, layout, block_size, selected) if wanted == "auto" else wanted
    plain = {composed.NAME: composed, reference.NAME: reference}
    return cast(Backend, plain[name]) if name in plain else _triton()


def _triton() -> Backend:
    """The Triton kernels, imported at the first use."""
    from moba_train.attention.blocks.triton import attention

    return cast(Backend, attention)


def _best(key: str, q_THD: Tensor, layout: Layout, block_size: int, selected: int) -> str:
    """Name of the backend that `auto` takes."""
    if not q_THD.is_cuda:
        return "reference"
    no_triton = _triton_refuses(q_THD, layout, block_size, selected)
    no_composed = composed.refuses(q_THD, layout, block_size) if no_triton else ""
    if no_triton and no_composed:
        slow = f"{key}: auto takes plain PyTorch, which is very much slower than the kernels"
        warnings.warn(f"{slow}: {no_triton}; {no_composed}", stacklevel=2)  # shown once per place, Python's default
        return "reference"
    if no_triton:
        kernel = composed.kernel_name(q_THD, layout, block_size)
        return _picked(key, "composed", f"on {kernel}; not triton: {no_triton}")
    if _composed_pays(q_THD, layout, block_size):
        kernel = composed.kernel_name(q_THD, layout, block_size)
        return _picked(key, "composed", f"on {kernel}, faster for blocks of {block_size}")
    return _picked(key, "triton", f"which can do head dim {q_THD.shape[-1]} and block_size {block_size}")


def _composed_pays(q_THD: Tensor, layout: Layout, block_size: int) -> bool:
    """Whether `composed` is faster than `triton` where both can run: a rule from measurements."""
    few = q_THD.shape[0] * q_THD.shape[1] < (_COMPOSED_ROWS if layout.is_whole else _COMPOSED_ROWS_OF_A_SHARD)
    if few or block_size < min(_COMPOSED_PAYS_FROM.values(), default=math.inf):
        return False  # without a look at the optional packages, which takes seconds
    pays = block_size >= _COMPOSED_PAYS_FROM.get(composed.kernel_name(q_THD, layout, block_size), math.inf)
    return pays and not composed.refuses(q_THD, layout, block_size)


@cache
def _picked(key: str, name: str, why: str) -> str:
    logger.info("%s: auto takes %s, %s", key, name, why)
    return name


def _triton_refuses(x: Tensor, layout: Layout, block_size: int, selected: int) -> str:
    """Why the Triton kernels cannot attend for queries like `x`; empty when they can."""
    return triton_refuses(x, layout, block_size, selected) or triton_block_size(block_size)
