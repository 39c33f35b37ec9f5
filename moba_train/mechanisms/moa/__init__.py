"""Mixture of Attention spans (Fu et al. 2024, arXiv:2406.14909): one sliding window for each head."""
