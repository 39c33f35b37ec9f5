"""This rank's part of a sharded tensor, as a plain tensor that kernels and other libraries can work on."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Detached, sharing the memory."""
    # Not `DTensor.to_local`, whose autograd function, or the context without, takes longer than all else here; and
    # without torchao's wrapper first, which detaches in Python, ten times as slowly.
    return unwrapped(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside torchao's wrapper of a weight that FSDP gathers in FP8; other tensors as they are."""
    inner = getattr(tensor, "_tensor", None)
    return inner if isinstance(inner, Tensor) else tensor
