"""MoBA for NVIDIA GPUs (Hopper first), in Triton: forward and backward, deterministic, without host synchronisation.

tables      which block each token is in, where each block lies
pool        mean key of each block
select      gate and top-k in one kernel; the scores never reach memory
lists       for each block, the query rows that chose it
tiles       tile shapes, and the tables that hand row tiles to programs
forward     attention of row tiles to one block; the own blocks
backward    dq over the same row tiles; dk and dv over key tiles
packed      dk and dv of long blocks, from rows copied side by side
combine     joins what the row tiles found out about one query
attention   the whole, in bounded memory

Imported only when used, so that moba_train needs no Triton.

Names of sizes in kernels: D head width, G query heads per key/value head, C choices per query, BLOCK tokens per MoBA
block, M rows and N keys of a tile. A *row* is one query of one head. Inside a key/value head, row `t * G + g` is head g
of its group at token t, and *entry* `(t * G + g) * C + j` is that row's j-th choice.

Counts that change from batch to batch are `do_not_specialize`: Triton would compile a kernel anew whenever one happens
to be 1 or a multiple of 16.
"""
