"""Mixture of Block Attention (Lu et al. 2025, arXiv:2502.13189).

gate         mean key of each block, query . mean key, top-k with a fixed order among ties: plain PyTorch
triton       the gate as GPU kernels
convolution  a short convolution over keys, before the gate sees them (`key_conv`)
kind         what a recipe's `kind: moba` names
attention    its LocalAttention
function     `moba_attention`, on plain tensors

Attention to the selected blocks is ../blocks. Nothing here imports torch.distributed.
"""

from moba_train.attention.moba.function import moba_attention

__all__ = ["moba_attention"]
