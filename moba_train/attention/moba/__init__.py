"""Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189).

blocks        which block a token is in
gate          mean key of each block, query . mean key
selection     top-k with a fixed order among ties
statistics    how the chosen blocks are spread
reference     attention to the chosen blocks, in plain PyTorch
flash         the same, composed of calls of a varlen flash kernel
sorted_parts  what flash sorts, gathers and joins, in plain PyTorch (triton.gathered has kernels for it)
triton        all of it as GPU kernels
available     whether these can run
backends      which of these a call gets
layer         the LocalAttention that a recipe's `kind: moba` names
function      `moba_attention`, on plain tensors

Nothing here imports torch.distributed.
"""

from moba_train.attention.moba.function import moba_attention

__all__ = ["moba_attention"]
