"""Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189).

Attention to the selected blocks is in ../kernels. Nothing here imports torch.distributed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moba_train.attention.moba.function import moba_attention

__all__ = ["moba_attention"]


def __getattr__(name: str) -> Any:
    """`moba_attention`, imported when it is asked for: torch._dynamo comes with it, 0.4 s of a command."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moba_train.attention.moba import function

    return function.moba_attention
