"""Attention inside many segments at once: full attention and the composed block attention are built from it."""

from torch import Tensor

from moba_train.attention.kernels.varlen.kernels import Cpu, FlashAttention4, PackagedFlash2, TorchFlash
from moba_train.attention.kernels.varlen.protocol import Segments, VarlenKernel

__all__ = [
    "KERNELS",
    "Cpu",
    "FlashAttention4",
    "PackagedFlash2",
    "Segments",
    "TorchFlash",
    "VarlenKernel",
    "best_kernel",
    "refusals",
]

KERNELS: tuple[type[VarlenKernel], ...] = (FlashAttention4, TorchFlash, PackagedFlash2, Cpu)
"""Fastest first."""


def best_kernel(q_NHD: Tensor, segments: int = 1) -> type[VarlenKernel] | None:
    """The fastest kernel that works on tensors like `q` with this many segments; None without any."""
    return next((kernel for kernel in KERNELS if not _refuses(kernel, q_NHD, segments)), None)


def refusals(q_NHD: Tensor, segments: int = 1) -> str:
    """The reason of every kernel that it does not work on tensors like `q` with this many segments."""
    return "; ".join(f"{kernel.name}: {_refuses(kernel, q_NHD, segments)}" for kernel in KERNELS)


def _refuses(kernel: type[VarlenKernel], q_NHD: Tensor, segments: int) -> str:
    if segments > kernel.most_segments:
        return f"{segments} segments, at most {kernel.most_segments} supported"
    return kernel.refuses(q_NHD)
