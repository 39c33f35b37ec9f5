"""Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189), without torch.distributed; its kernels: ../kernels."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moba_train.attention.moba.function import moba_attention as moba_attention


def __getattr__(name: str) -> Any:
    """`moba_attention`, imported when it is asked for: torch._dynamo comes with it, 0.4 s of a command."""
    if name != "moba_attention":
        raise AttributeError(f"no {name!r} in {__name__}")
    from moba_train.attention.moba import function

    return function.moba_attention
