"""Kinds with a gate of their own that is distilled from full attention: SeerAttention and MiniMax Sparse Attention.

kind            what both share: two stages (`mode`), the call of full or of block-sparse attention, the gate's loss
grid            blocks as rows of equal length, and chunks of queries with the blocks that they may see
seer            the kind `seer`: pooled queries against pooled keys
seer_operators  its computations as torch operators
seer_kernel     the target of its gate in Triton
msa             the kind `msa`: the best token of each block against an index query
msa_operators   its computations as torch operators
msa_kernels     scores of blocks, attention's probability in them and gradients in Triton
msa_pairs       the pairs of queries and blocks that the kernels look at
msa_reference   the same scores, probabilities and gradients in plain PyTorch
"""
