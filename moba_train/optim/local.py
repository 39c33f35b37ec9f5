"""This rank's part of a sharded tensor, as a plain tensor that kernels and other libraries can work on."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Detached, sharing the memory."""
    with torch.no_grad():  # DTensor.to_local is ten times as fast without autograd
        return unwrapped((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach())


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside torchao's wrapper of a weight that FSDP gathers in FP8; other tensors as they are."""
    inner = getattr(tensor, "_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor
