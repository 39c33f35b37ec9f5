"""MoBA as a LocalAttention: the gate summarises, the selection plans, a backend attends."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

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
        backend: Literal["auto", "reference"] = Field("auto", description="reference: plain PyTorch, any device")

    def __init__(self, options: Section, head_dim: int, softmax_scale: float | None = None) -> None:
        assert isinstance(options, MobaAttention.Options)
        forced = {"current", *options.always}
        if len(forced) > options.topk:
            raise ValueError(f"always: {options.always} forces {len(forced)} blocks, topk is {options.topk}")
        self.options = options
        self.alignment = options.block_size
        self.scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor:
        """The mean key of every block, [blocks, K, D]."""
        return pool_keys(k_SKD, layout, self.options.block_size)

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        """The chosen history blocks, int32 [H, T, C] (see `select_blocks`)."""
        assert summaries is not None
        options = self.options
        chosen_HTC = select_blocks(
            q_THD,
            summaries,
            layout,
            block_size=options.block_size,
            topk=options.topk,
            select=options.select,
            always=options.always,
        )
        return (chosen_HTC,)

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Plan:
        """See `LocalAttention.empty_plan`."""
        choices = min(self.options.topk - 1, block_bound(layout, self.options.block_size))
        return (q_THD.new_empty((q_THD.shape[1], q_THD.shape[0], choices), dtype=torch.int32),)

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, plan: Plan) -> tuple[Tensor, Tensor]:
        """See `LocalAttention.attend`."""
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
        mask = chosen_mask(plan[0], layout, self.options.block_size)
        tensors = (dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT)
        return masked_attend_backward(*tensors, mask, self.scale, prefix=layout.is_whole)
