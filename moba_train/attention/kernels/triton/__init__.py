"""Attention to selected blocks on NVIDIA GPUs, in Triton: forward and backward, deterministic, without host
synchronisation (except in composed_rows.py, which serves ../composed.py). Imported only when used, so that moba_train
needs no Triton.

Sizes in kernels: D head width, G query heads per key/value head, HISTORY blocks that a query selects before its
diagonal block (topk - 1), BLOCK tokens of a block, M rows and N keys of a tile. ../common/lists.py says what rows,
slots and lists are, with an example. DIAGONAL is for the block of the query itself, causal; PARTIAL where k and v are a
part of the keys.

Counts that change from batch to batch are `do_not_specialize`: Triton would compile a kernel again whenever one happens
to be 1 or a multiple of 16.
"""
