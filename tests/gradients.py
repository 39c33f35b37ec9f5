"""Gradients and weights that must be there, as whole tensors."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def full_tensor(sharded: Tensor) -> Tensor:
    """A sharded tensor, without gradient, gathered from all ranks."""
    assert isinstance(sharded, DTensor)
    with torch.no_grad():
        return sharded.full_tensor()


def full_gradient(parameter: Tensor) -> Tensor:
    """The gradient of a sharded parameter, gathered from all ranks."""
    return full_tensor(gradient(parameter))
