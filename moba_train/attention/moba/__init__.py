"""Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189).

Attention to the selected blocks is in ../kernels. Nothing here imports torch.distributed.
"""

from moba_train.attention.moba.function import moba_attention

__all__ = ["moba_attention"]
