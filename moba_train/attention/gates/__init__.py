"""Kinds with a gate of their own that is distilled from full attention: SeerAttention and MiniMax Sparse Attention.

kind            what both share: two stages (`mode`), the call of full or of block-sparse attention, the gate's loss
grid            blocks as rows of equal length, and chunks of queries with the blocks that they may see
seer            the kind `seer`: pooled queries against pooled keys
seer_operators  its computations as torch operators
msa             the kind `msa`: the best token of each block against an index query
msa_operators   its computations as torch operators
"""
