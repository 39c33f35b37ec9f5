"""Attention to selected blocks on NVIDIA GPUs (Hopper first), in Triton: forward and backward, deterministic, without
host synchronisation (except in gathered, which serves ../composed.py).

tables        which block each token is in, where each block lies
lists         for each block, the query rows that selected it
tiles         tile shapes; the ranges of work that are in memory together
tile_tables   which program takes which rows of the lists
launch        launches, and their repetition from a record
call          the sizes of one call, and the launches that all blocks share
softmax       what kernels share about a row's softmax
short_blocks  blocks of one tile of keys: attention; all gradients in one pass
long_blocks   longer blocks: attention of row tiles to one block; launches of all their kernels
dq            dq of longer blocks, over these row tiles
packed        dk and dv of longer blocks, from rows copied side by side
key_tile      all gradients of a tile of keys in one pass, on Hopper (in Gluon, as the next three)
history_pass  these of long blocks' lists, from the rows of packed
gathered_pass  these of the lists of blocks of one tile of keys, from rows gathered as they are needed
own_pass      these of long blocks' own rows
one_pass      the launches of these, in place of dq and packed
row_tile      attention of a tile of rows by warps that have roles, on Hopper (in Gluon, as the next)
forward_pass  these of long blocks' lists and own rows
forward_launches  the launches of these, in place of long_blocks' attention
bulk_copies   descriptors of tensors for kernels in Gluon
spans         attention to a span of neighbouring keys, in place of the own block
choose        the blocks with the highest scores
gathered      rows side by side for a varlen kernel, instead of the two kinds of blocks above
combine       joins the partial results of one query
best          the best blocks of every query, for kernels that score them
attention     the backend: all of it, in bounded memory

Imported only when used, so that moba_train needs no Triton.

Names of sizes in kernels: D head width, G query heads per key/value head, C selected blocks per query, BLOCK tokens per
block, M rows and N keys of a tile. A *row* is one query of one head. Inside a key/value head, row `t * G + g` is head g
of its group at token t, and *entry* `(t * G + g) * C + j` is that row's j-th selected block.

Counts that change from batch to batch are `do_not_specialize`: Triton would compile a kernel anew whenever one happens
to be 1 or a multiple of 16.
"""
