"""FSDP's transfers by the GPUs' copy engines instead of NCCL.

NCCL transfers by kernels, on multiprocessors that matrix products then lack; copy engines leave all of them to the
layers computed meanwhile. NCCL's reduce-scatter adds on the way, so what it sends must be float32 already: twice the
bytes of bf16, written into a buffer and read again. Here gradients travel in their own dtype and are added up in
float32 on arrival. The ranks of a group copy into each other's memory: torch's symmetric memory, without NVLink
multicast. Two barriers for each transfer, kernels of one thread block, settle which rank may write when. From torch
2.13 on FSDP has `set_symm_mem_for_comm`, by NCCL; its buffers come from a pool that may pair them wrongly between ranks
(pytorch issue 190977), so these ones take turns.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train import torch_private


def add_up(addends: Sequence[Tensor], result: Tensor) -> None:
    """`result` [n], float32, becomes the sum of `addends` [n], in their order. Compiled it is one kernel, with the same
    bits; torch's own for such sums, of rows or of two dtypes, run at a fraction of the memory's rate."""
    result.copy_(addends[0])
    for addend in addends[1:]:
        result.add_(addend)


GATHER_BUFFERS = 2
"""Gathered units that there is room for: FSDP keeps one until the next one is there, and begins no third one before the
first is copied out."""
REDUCTION_BUFFER = 2**28
"""Bytes of gradients that travel at once: half of those of a block of the 8B in bf16."""


@dataclass(frozen=True)
class SharedBuffer:
    """Memory of this rank that the others of its group write into, and theirs; uint8 [bytes] each."""

    own: Tensor
    theirs: Mapping[int, Tensor]
    """Buffers of the other ranks, by rank in the group."""
    barrier: Callable[[int], object]
    """Make the current stream wait for those of all ranks of the group; its argument, 0 or 1, distinguishes
    barriers."""


MakeBuffer = Callable[[dist.ProcessGroup, torch.device, int, timedelta], SharedBuffer]
"""Makes a shared buffer from a group, a device, a number of bytes and the timeout of barriers; a collective."""


def symmetric_memory(group: dist.ProcessGroup, device: torch.device, size: int, timeout: timedelta) -> SharedBuffer:
    """A buffer of `size` bytes on each rank's GPU, as `MakeBuffer` says. A barrier that waits too long ends the process
    by a CUDA error. Raises RuntimeError where the GPUs do not reach each other's memory."""
    symmetric = torch_private.symmetric_memory()
    # Parts are copied from GPU to GPU, which needs no multicast.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 needs no such call, 2.11 does
        symmetric.enable_symm_mem_for_group(group.group_name)
    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    memory = symmetric.rendezvous(own, group.group_name)
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    theirs = {rank: memory.get_buffer(rank, (size,), torch.uint8) for rank in others}
    limit_ms = int(1000 * timeout.total_seconds())
    return SharedBuffer(own, theirs, lambda which: memory.barrier(which, limit_ms))


class _Copies:
    """Copies side by side: on one stream they would wait for each other."""

    def __init__(self, device: torch.device, number: int) -> None:
        """number: of copies at once, at most."""
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(number)] if on_gpu else []

    def __call__(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Copy each of `parts` to its place, in the order of the current stream."""
        if not self._streams:  # a CPU
            for part, place in zip(parts, places, strict=True):
                place.copy_(part)
            return
        current = torch.cuda.current_stream()
        for stream, part, place in zip(self._streams, parts, places, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                place.copy_(part)
        for stream in self._streams:
            current.wait_stream(stream)


class CopyEngineGather:
    """FSDP's all-gather for units that take turns, as the blocks of one model: all ranks gather the same ones in the
    same order. The buffers are no part of torch's count of allocated memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        size: int,
        timeout: timedelta,
        make_buffer: MakeBuffer = symmetric_memory,
    ) -> None:
        """A collective. group: the ranks that share the weights, all on one node; size: bytes of the largest unit;
        timeout: how long a gather may wait for another rank."""
        self._rank = group.rank()
        self._buffers = [make_buffer(group, device, size, timeout) for _ in range(GATHER_BUFFERS)]
        self._turn = 0
        # Gathers so took 9 to 12 ms off 855 of the 8B's step at 8K on two H200
        # (benchmarks/results/training-8b-8k-copy-engines-h200-x2.json).
        self._copy = _Copies(device, group.size() - 1)

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The result [size] of the next gather, of which FSDP fills this rank's part: the buffer used the longest ago,
        whose result FSDP has copied out, in the order of the streams that it gathers on."""
        # Turns in the same order on all ranks: with a pool's choice ranks might pair different buffers (pytorch issue
        # 190977).
        self._turn = (self._turn + 1) % GATHER_BUFFERS
        lengths = [int(length) for length in size]
        own = self._buffers[self._turn].own
        needed = prod(lengths) * dtype.itemsize
        assert needed <= own.numel(), f"a unit of {needed} bytes, room for {own.numel()}"
        return own[:needed].view(dtype).view(lengths)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Copy this rank's part, `input_tensor`, to all other ranks; `output_tensor` is what was allocated last and has
        that part already. Complete on the current stream."""
        assert not async_op, "asked for only where a user unshards by hand"
        buffer = self._buffers[self._turn]
        assert output_tensor.data_ptr() == buffer.own.data_ptr(), "one allocation for one gather"
        part = input_tensor.view(torch.uint8)
        place = slice(self._rank * part.numel(), (self._rank + 1) * part.numel())
        buffer.barrier(0)  # the buffers of all ranks are free
        self._copy([part] * len(buffer.theirs), [theirs[place] for theirs in buffer.theirs.values()])
        buffer.barrier(1)  # all parts have arrived


class CopyEngineReduceScatter:
    """FSDP's reduce-scatter of gradients, which the ranks copy into each other's buffers in their own dtype, a piece at
    a time; each rank adds up its part of all ranks', in the order of ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        timeout: timedelta,
        make_buffer: MakeBuffer = symmetric_memory,
        size: int = REDUCTION_BUFFER,
        compiled: bool = False,
    ) -> None:
        """A collective. group: the ranks that share the weights, all on one node; dtype: of the gradients; timeout: how
        long a sum may wait for another rank; size: bytes of the buffer; compiled: they are added up by compiled code,
        in one pass."""
        self._rank = group.rank()
        self._ranks = group.size()
        self._dtype = dtype
        self._has_input = False
        # For one size at a time: code for any size reads a number at a time.
        # Compiled sums take 26 and 15 ms of kernels on two ranks, where torch's took 43 and 80 (the 8B at 8K;
        # benchmarks/LOG.md, "8K tokens").
        self._add_up = torch.compile(add_up, dynamic=False) if compiled else add_up
        self._room = size // (self._ranks * dtype.itemsize)
        self._buffer = make_buffer(group, device, size, timeout)
        self._copy = _Copies(device, self._ranks - 1)

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
        """`output_tensor` [n] becomes the sum of this rank's parts of all ranks' `input_tensor` [ranks * n], in pieces
        that the buffer has room for. Complete on the current stream."""
        assert not async_op, "FSDP never asks for it"
        assert op == dist.ReduceOp.SUM, f"gradients are summed, never {op}"
        assert input_tensor.dtype == self._dtype
        parts = input_tensor.view(self._ranks, -1)
        for first in range(0, output_tensor.numel(), self._room):
            piece = slice(first, first + self._room)
            self._reduce_piece(parts[:, piece], output_tensor[piece])

    def _reduce_piece(self, parts: Tensor, result: Tensor) -> None:
        """`result` [n] becomes the sum of row `rank` of all ranks' `parts` [ranks, n], which fit into the buffer."""
        length = parts[0].nbytes
        place = slice(self._rank * length, (self._rank + 1) * length)
        # The own part does not travel and is read where FSDP has put it.
        places = [theirs[place].view(self._dtype) for theirs in self._buffer.theirs.values()]
        self._buffer.barrier(0)  # the buffers of all ranks are free
        self._copy([parts[rank] for rank in self._buffer.theirs], places)
        self._buffer.barrier(1)  # all parts have arrived
        arrived = self._buffer.own[: parts.nbytes].view(self._dtype).view(parts.shape)
        self._add_up([parts[rank] if rank == self._rank else arrived[rank] for rank in range(self._ranks)], result)


def gathered_bytes(unit: nn.Module, ranks: int, dtype: torch.dtype) -> int:
    """Bytes of what `ranks` ranks gather for a unit of FSDP that is not sharded yet: each weight in equal parts, the
    last ones filled up, in `dtype` or, those that torchao wraps, in FP8."""
    return ranks * sum(_part_bytes(weight, ranks, dtype) for weight in unit.parameters())


def _part_bytes(weight: Tensor, ranks: int, dtype: torch.dtype) -> int:
    here = torch_private.local_tensor(weight) if isinstance(weight, DTensor) else weight
    width = 1 if hasattr(here, "fsdp_pre_all_gather") else dtype.itemsize
    return -(-here.shape[0] // ranks) * prod(here.shape[1:]) * width
