"""Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089): compressed, selected and sliding-window attention."""
