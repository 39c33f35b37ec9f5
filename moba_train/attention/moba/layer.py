"""MoBA as a LocalAttention: the gate summarises, the selection plans, a backend attends."""

import importlib.util
import os
import warnings
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.masked import masked_attend, masked_attend_backward
from moba_train.attention.moba.blocks import block_bound
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.moba.reference import chosen_mask
from moba_train.attention.moba.selection import select_blocks
from moba_train.attention.protocol import Layout, LocalAttention, Plan
from moba_train.config.base import Section
from moba_train.units import Length


class MobaAttention(LocalAttention):
    """Mixture of Block Attention: each query and head attends to its own block and to its top-k blocks of history."""

    class Options(Section):
        """Options of `kind: moba`."""

        block_size: Length = Field(512, description="tokens per block; blocks start anew with each document")
        topk: int = Field(3, ge=1, description="blocks each query attends to, its own included; 1: own block only")
        select: Literal["head", "group"] = Field(
            "head", description="choose per query head, or once for all query heads that share a key/value head"
        )
        always: tuple[Literal["current", "previous", "first"], ...] = Field(
            ("current",), description="blocks that are chosen whatever their gate; they count towards topk"
        )
        backend: Literal["auto", "triton", "reference"] = Field(
            "auto",
            description="triton: kernels for CUDA and 16-bit dtypes; reference: plain PyTorch, any device; auto: dense "
            "attention where no document is longer than block_size x topk, else triton where it can",
        )

    def __init__(self, options: Section, head_dim: int, softmax_scale: float | None = None) -> None:
        assert isinstance(options, MobaAttention.Options)
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            raise ValueError(f"always: {options.always} forces {len(forced)} blocks, topk is {options.topk}")
        self.options = options
        self.alignment = options.block_size
        self.couples_heads = options.select == "group"
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.dense = FullAttention(FullAttention.Options(), head_dim, self.scale)

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every block, [blocks, K, D]."""
        kernels = self._kernels(k_SKD)
        if kernels and layout.k_runs is None:
            return kernels.summarize(k_SKD, layout, self.options.block_size)
        return pool_keys(k_SKD, layout, self.options.block_size)

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        """The chosen history blocks, int32 [H, T, C] (see `select_blocks`); for the kernels also the inverse lists.

        Nothing where every block is chosen.
        """
        if self._is_dense(layout):
            return ()
        assert summaries is not None
        options, kernels = self.options, self._kernels(q_THD)
        choose = kernels.choose if kernels else select_blocks
        chosen_HTC = choose(
            q_THD,
            summaries,
            layout,
            block_size=options.block_size,
            topk=options.topk,
            select=options.select,
            always=options.always,
        )
        if kernels and layout.is_whole:
            return (chosen_HTC, *kernels.invert_choice(chosen_HTC, layout, summaries.shape[1], options.block_size))
        return (chosen_HTC,)

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Plan:
        """See `LocalAttention.empty_plan`."""
        if self._is_dense(layout):
            return ()
        choices = min(self.options.topk - 1, block_bound(layout, self.options.block_size))
        chosen_HTC = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], choices), dtype=torch.int32)
        kernels = self._kernels(q_THD)
        if kernels and layout.is_whole:
            return (chosen_HTC, *kernels.empty_lists(chosen_HTC, layout, k_SKD.shape[1], self.options.block_size))
        return (chosen_HTC,)

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, plan: Plan) -> tuple[Tensor, Tensor]:
        """See `LocalAttention.attend`."""
        if self._is_dense(layout):
            return self.dense.attend(q_THD, k_SKD, v_SKD, layout, ())
        kernels = self._kernels(q_THD)
        if kernels and layout.is_whole:
            return kernels.attend(
                q_THD, k_SKD, v_SKD, layout, *plan, block_size=self.options.block_size, scale=self.scale
            )
        mask = chosen_mask(plan[0], layout, self.options.block_size)
        return masked_attend(q_THD, k_SKD, v_SKD, mask, self.scale, prefix=layout.is_whole)

    def attend_backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        layout: Layout,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LocalAttention.attend_backward`."""
        tensors = (dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT)
        if self._is_dense(layout):
            return self.dense.attend_backward(*tensors, layout, ())
        kernels = self._kernels(q_THD)
        if kernels and layout.is_whole:
            return kernels.attend_backward(
                *tensors, layout, *plan, block_size=self.options.block_size, scale=self.scale
            )
        mask = chosen_mask(plan[0], layout, self.options.block_size)
        return masked_attend_backward(*tensors, mask, self.scale, prefix=layout.is_whole)

    def _is_dense(self, layout: Layout) -> bool:
        """Whether no document has more than `topk` blocks: then MoBA is dense attention, whose kernels are faster."""
        longest = self.options.topk * self.options.block_size
        return self.options.backend == "auto" and layout.is_whole and layout.max_seqlen <= longest

    def _kernels(self, x: Tensor) -> ModuleType | None:
        """The Triton backend where it can and shall do the call; it is imported at the first such call."""
        wanted = self.options.backend
        if wanted == "reference" or (wanted == "auto" and not x.is_cuda):
            return None
        if reason := self._not_for_kernels(x):
            if wanted == "triton":
                raise ValueError(f"attention.moba.backend: 'triton' cannot run this call: {reason}; use 'auto'")
            message = f"MoBA runs on plain PyTorch, which is very much slower than its kernels: {reason}"
            warnings.warn(message, stacklevel=3)  # shown once per place, Python's default
            return None
        from moba_train.attention.moba.triton import attention

        return attention

    def _not_for_kernels(self, x: Tensor) -> str:
        """Why the kernels cannot work on tensors like `x` ([tokens, heads, D]); empty when they can."""
        block_size, topk = self.options.block_size, self.options.topk
        if not _has_triton():
            return "the package triton is not installed"
        if not x.is_cuda and not _interpreted():
            return f"tensors are on {x.device.type}, not on CUDA"
        if x.dtype not in (torch.float16, torch.bfloat16) and not _interpreted():
            return f"dtype {x.dtype}, bfloat16 or float16 needed"
        if x.shape[-1] not in (64, 128):
            return f"head dim {x.shape[-1]}, 64 or 128 needed"
        if block_size % 16 or not 64 <= block_size <= 16384:
            return f"block_size {block_size}, a multiple of 16 from 64 to 16384 needed"
        if topk > 64:
            return f"topk {topk}, at most 64 supported"
        if self.scale <= 0:
            return f"softmax scale {self.scale}, a positive one needed"
        return ""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    """True under TRITON_INTERPRET=1, which runs the kernels on the CPU, in float32 too, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"
