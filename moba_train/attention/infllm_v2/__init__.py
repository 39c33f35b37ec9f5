"""InfLLM-V2 (Zhao et al. 2025, arXiv:2509.24663): dense attention that becomes block-sparse for long documents.

scores     softmax over mean keys of overlapping windows, summed over a group of heads, the maximum of each block
kernel     the same scores in Triton
attention  its LocalAttention
kind       what a recipe's `kind: infllm_v2` names

Attention to the selected blocks is ../blocks.
"""
