"""The ways to attend to the chosen blocks, which one a call gets, and where the choice itself is made.

A backend is a module with the functions of `Backend`: reference.py, flash.py and triton/attention.py.
"""

import logging
import math
import warnings
from functools import cache
from types import ModuleType
from typing import Protocol, cast

import torch
from torch import Tensor

from moba_train.attention.moba import flash, reference
from moba_train.attention.moba.available import has_triton, interpreted
from moba_train.attention.moba.blocks import in_one_run
from moba_train.attention.protocol import Layout, Plan

logger = logging.getLogger(__name__)

_FLASH_PAYS_FROM = {"flash-attn-4": 2048}
"""Block size from which `flash` on a varlen kernel of this name is faster than `triton` (docs/performance-log.md)."""
_FLASH_ROWS = 2**21
"""Query rows (tokens x heads) from which its partial results are small beside what dense attention takes."""
_FLASH_ROWS_OF_A_SHARD = 2**19
"""The fewest that it was measured with in a shard, beside which all keys are in memory anyway."""


class Backend(Protocol):
    """What a backend's module can do. Shapes and dtypes are those of `LocalAttention`; `chosen` is int32 [H, T, C]."""

    def invert_choice(self, chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Plan:
        """What it wants to keep about a choice for `attend` and `attend_backward`, if anything."""
        ...

    def empty_lists(self, chosen_HTC: Tensor, layout: Layout, kv_heads: int, block_size: int) -> Plan:
        """Tensors of the shapes and dtypes of that, contents undefined."""
        ...

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, *plan: Tensor, block_size: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse; `plan` is the choice and what `invert_choice` made of it."""
        ...

    def attend_backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        layout: Layout,
        *plan: Tensor,
        block_size: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv)."""
        ...


def pick_backend(wanted: str, q_THD: Tensor, layout: Layout, *, block_size: int, topk: int) -> Backend:
    """The backend for a call, `wanted` or the best one; what `flash` cannot compose it gives to the reference.

    Raises ValueError when the one that is wanted cannot do the call. What `auto` picks, and why, is logged once.
    """
    if wanted == "reference" or (wanted == "flash" and not flash.composes(layout, block_size)):
        return cast(Backend, reference)
    no_flash = flash.refuses(q_THD, layout, block_size) if wanted == "flash" else ""
    no_triton = _refuses_attention(q_THD, layout, block_size, topk) if wanted == "triton" else ""
    if reason := no_flash or no_triton:
        raise ValueError(f"attention.moba.backend: {wanted!r} cannot run this call: {reason}; use 'auto'")
    name = _best(q_THD, layout, block_size, topk) if wanted == "auto" else wanted
    return cast(Backend, triton() if name == "triton" else {"flash": flash, "reference": reference}[name])


def pick_selector(wanted: str, x: Tensor, layout: Layout, *, block_size: int, topk: int) -> ModuleType | None:
    """The kernels that pool keys and choose blocks for tensors like `x` ([tokens, heads, D]); None: plain PyTorch does.

    `flash` has none of its own: it shares those of `triton` where they can run.
    """
    if wanted == "reference" or (wanted != "triton" and not x.is_cuda):
        return None
    return None if _refuses_selection(x, layout, block_size, topk) else triton()


def triton() -> ModuleType:
    """The Triton kernels, imported at the first use."""
    from moba_train.attention.moba.triton import attention

    return attention


def _best(q_THD: Tensor, layout: Layout, block_size: int, topk: int) -> str:
    """What `auto` takes."""
    if not q_THD.is_cuda:
        return "reference"
    no_triton = _refuses_attention(q_THD, layout, block_size, topk)
    no_flash = flash.refuses(q_THD, layout, block_size) if no_triton else ""
    if no_triton and no_flash:
        message = "MoBA runs on plain PyTorch, which is very much slower than its kernels: "
        warnings.warn(f"{message}{no_triton}; {no_flash}", stacklevel=4)  # shown once per place, Python's default
        return "reference"
    if no_triton:
        return _picked("flash", f"on {flash.kernel_name(q_THD, layout, block_size)}; not triton: {no_triton}")
    if _flash_pays(q_THD, layout, block_size):
        return _picked("flash", f"on {flash.kernel_name(q_THD, layout, block_size)}, faster for blocks of {block_size}")
    return _picked("triton", f"which can do head dim {q_THD.shape[-1]} and block_size {block_size}")


def _flash_pays(q_THD: Tensor, layout: Layout, block_size: int) -> bool:
    """Whether `flash` is faster than `triton` where both can run: a rule from measurements."""
    few = q_THD.shape[0] * q_THD.shape[1] < (_FLASH_ROWS if layout.is_whole else _FLASH_ROWS_OF_A_SHARD)
    if few or block_size < min(_FLASH_PAYS_FROM.values(), default=math.inf):
        return False  # without a look at the optional packages, which takes seconds
    pays = block_size >= _FLASH_PAYS_FROM.get(flash.kernel_name(q_THD, layout, block_size), math.inf)
    return pays and not flash.refuses(q_THD, layout, block_size)


@cache
def _picked(name: str, why: str) -> str:
    logger.info("attention.moba.backend: auto takes %s, %s", name, why)
    return name


def _refuses_attention(x: Tensor, layout: Layout, block_size: int, topk: int) -> str:
    """Why the Triton kernels cannot attend for tensors like `x`; empty when they can."""
    if reason := _refuses_selection(x, layout, block_size, topk):
        return reason
    if block_size % 16 or not 64 <= block_size <= 16384:
        return f"block_size {block_size}, a multiple of 16 from 64 to 16384 needed"
    return ""


def _refuses_selection(x: Tensor, layout: Layout, block_size: int, topk: int) -> str:
    """Why the Triton kernels cannot pool and choose for tensors like `x`; empty when they can."""
    if not has_triton():
        return "the package triton is not installed"
    if not x.is_cuda and not interpreted():
        return f"tensors are on {x.device.type}, not on CUDA"
    if x.dtype not in (torch.float16, torch.bfloat16) and not interpreted():
        return f"dtype {x.dtype}, bfloat16 or float16 needed"
    if x.shape[-1] not in (64, 128):
        return f"head dim {x.shape[-1]}, 64 or 128 needed"
    if topk > 64:
        return f"topk {topk}, at most 64 supported"
    for runs in (layout.q_runs, layout.k_runs):
        if not in_one_run(runs, block_size):
            return f"a shard whose runs {runs} are less than block_size {block_size} apart"
    return ""
