"""MoBA as a LocalAttention: the gate summarises, the selection plans, a backend attends."""

import math
from types import ModuleType
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.moba.backends import Backend, pick_backend, pick_selector
from moba_train.attention.moba.blocks import block_bound
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.moba.selection import select_blocks
from moba_train.attention.moba.statistics import choice_statistics
from moba_train.attention.protocol import Layout, LocalAttention, Plan
from moba_train.config.base import Section
from moba_train.config.quantities import Length


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
        backend: Literal["auto", "triton", "flash", "reference"] = Field(
            "auto",
            description="triton: kernels for CUDA and 16-bit dtypes; flash: varlen flash attention over gathered "
            "queries, then a merge; reference: plain PyTorch, any device; auto: dense attention where no document is "
            "longer than block_size x topk, else triton where it can, else flash where it can",
        )

    work_grows = False  # every query attends to topk blocks; the gate, which does grow, is small

    def __init__(self, options: Section, head_dim: int, softmax_scale: float | None = None) -> None:
        assert isinstance(options, MobaAttention.Options)
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            raise ValueError(f"always: {options.always} forces {len(forced)} blocks, topk is {options.topk}")
        self.options = options
        self.alignment = options.block_size
        self.couples_heads = options.select == "group"
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        if not 0 < self.scale < math.inf:  # flash kernels find a row's maximum before they scale it
            raise ValueError(f"softmax_scale: {softmax_scale} given, a positive, finite number needed")
        self.dense = FullAttention(FullAttention.Options(), head_dim, self.scale)

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every block, [blocks, K, D]; zeros for those of which nothing is here."""
        if kernels := self._selector(k_SKD, layout):
            return kernels.summarize(k_SKD, layout, self.options.block_size)
        return pool_keys(k_SKD, layout, self.options.block_size)

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        """The chosen history blocks, int32 [H, T, C] (see `select_blocks`), and what the backend makes of them.

        Nothing where every block is chosen.
        """
        if self._is_dense(layout):
            return ()
        assert summaries is not None
        backend = self._backend(q_THD, layout)
        options, kernels = self.options, self._selector(q_THD, layout)
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
        return (chosen_HTC, *backend.invert_choice(chosen_HTC, layout, summaries.shape[1], options.block_size))

    def describe_plan(self, plan: Plan, layout: Layout) -> dict[str, float]:
        """How the chosen blocks are spread, see `choice_statistics`; {} where every block is chosen."""
        if not plan:
            return {}
        options = self.options
        chosen_HTC, *_ = plan
        return choice_statistics(
            chosen_HTC, layout, block_size=options.block_size, topk=options.topk, always=options.always
        )

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Plan:
        """See `LocalAttention.empty_plan`."""
        if self._is_dense(layout):
            return ()
        choices = min(self.options.topk - 1, block_bound(layout, self.options.block_size))
        chosen_HTC = q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], choices), dtype=torch.int32)
        backend = self._backend(q_THD, layout)
        return (chosen_HTC, *backend.empty_lists(chosen_HTC, layout, k_SKD.shape[1], self.options.block_size))

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, plan: Plan) -> tuple[Tensor, Tensor]:
        """See `LocalAttention.attend`."""
        if self._is_dense(layout):
            return self.dense.attend(q_THD, k_SKD, v_SKD, layout, ())
        backend, block_size = self._backend(q_THD, layout), self.options.block_size
        return backend.attend(q_THD, k_SKD, v_SKD, layout, *plan, block_size=block_size, scale=self.scale)

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
        backend, block_size = self._backend(q_THD, layout), self.options.block_size
        return backend.attend_backward(*tensors, layout, *plan, block_size=block_size, scale=self.scale)

    def _is_dense(self, layout: Layout) -> bool:
        """Whether no document has more than `topk` blocks: then MoBA is dense attention, whose kernels are faster."""
        longest = self.options.topk * self.options.block_size
        return self.options.backend == "auto" and layout.max_seqlen <= longest

    def _backend(self, q_THD: Tensor, layout: Layout) -> Backend:
        block_size, topk = self.options.block_size, self.options.topk
        return pick_backend(self.options.backend, q_THD, layout, block_size=block_size, topk=topk)

    def _selector(self, x: Tensor, layout: Layout) -> ModuleType | None:
        return pick_selector(
            self.options.backend, x, layout, block_size=self.options.block_size, topk=self.options.topk
        )
