"""FSDP's sums of gradients over ranks, where gradients travel in their own dtype and are added up in float32.

NCCL's reduce-scatter adds on the way, so what it sends must be float32 already: twice the bytes of bf16, written into a
buffer and read again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class ExchangedGradients(ABC):
    """A reduce-scatter for FSDP by an exchange: each rank gets its part of all ranks' gradients and adds them up, in
    the order of ranks."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, compiled: bool = False) -> None:
        """group: the ranks that share the weights; dtype: of the gradients; compiled: they are added up by compiled
        code, in one pass."""
        self._group = group
        self._rank = group.rank()
        self._ranks = group.size()
        self._dtype = dtype
        self._has_input = False
        # For one size at a time: code for any size reads a number at a time.
        self._add_up = torch.compile(add_up, dynamic=False) if compiled else add_up

    @abstractmethod
    def reduce(self, parts: Tensor, result: Tensor) -> None:
        """`result` [n] becomes the sum of row `rank` of all ranks' `parts` [ranks, n]; on the current stream."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP asks first for what it copies the gradients into, all ranks' parts one after the other, then for this
        rank's part of the sum; `dtype` is that of the sum, float32."""
        self._has_input = not self._has_input
        return torch.empty(*size, dtype=self._dtype if self._has_input else dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """`output_tensor` [n] becomes the sum of this rank's parts of all ranks' `input_tensor` [ranks * n]. Complete
        on the current stream."""
        assert not async_op, "FSDP never asks for it"
        assert op == dist.ReduceOp.SUM, f"gradients are summed, never {op}"
        assert input_tensor.dtype == self._dtype
        self.reduce(input_tensor.view(self._ranks, -1), output_tensor)


class AllToAllReduceScatter(ExchangedGradients):
    """By one all-to-all."""

    def reduce(self, parts: Tensor, result: Tensor) -> None:
        """`result` [n] becomes the sum of row `rank` of all ranks' `parts` [ranks, n]; on the current stream."""
        arrived = torch.empty_like(parts)
        dist.all_to_all_single(arrived, parts, group=self._group)
        self._add_up([*arrived], result)


def add_up(addends: Sequence[Tensor], result: Tensor) -> None:
    """`result` [n], float32, becomes the sum of `addends` [n], in their order. Compiled it is one kernel, with the same
    bits; torch's own for such sums, of rows or of two dtypes, run at a fraction of the memory's rate."""
    result.copy_(addends[0])
    for addend in addends[1:]:
        result.add_(addend)
