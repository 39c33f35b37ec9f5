"""Attention to selected blocks on NVIDIA GPUs (Hopper first), in Triton: forward and backward, deterministic, without
host synchronisation (except in gathered, which serves ../composed.py).

Imported only when used, so that moba_train needs no Triton.

Names of sizes in kernels: D head width, G query heads per key/value head, C selected blocks per query, BLOCK tokens per
block, M rows and N keys of a tile. A *row* is one query of one head. Inside a key/value head, row `t * G + g` is head g
of its group at token t, and *entry* `(t * G + g) * C + j` is that row's j-th selected block.

Counts that change from batch to batch are `do_not_specialize`: Triton would compile a kernel anew whenever one happens
to be 1 or a multiple of 16.
"""
