"""MoBA for NVIDIA GPUs (Hopper first), in Triton: forward and backward, deterministic, without host synchronisation
(but for gathered, which serves ../flash.py).

tables        which block each token is in, where each block lies
pool          mean key of each block
select        gate and top-k in one kernel; the scores never reach memory
lists         for each block, the query rows that chose it
tiles         tile shapes, and the tables that hand row tiles to programs
call          the sizes of one call, and what both kinds of blocks launch
short         blocks of one tile of keys: attention; all gradients in one pass
short_blocks  their launches
forward       longer blocks: attention of row tiles to one block; the own blocks
backward      what both need first; dq of longer blocks over the same row tiles
packed        dk and dv of longer blocks, from rows copied side by side
long_blocks   their launches
gathered      rows side by side for somebody else's varlen kernel, instead of the above
combine       joins what was found out about one query
attention     the whole, in bounded memory

Imported only when used, so that moba_train needs no Triton.

Names of sizes in kernels: D head width, G query heads per key/value head, C choices per query, BLOCK tokens per MoBA
block, M rows and N keys of a tile. A *row* is one query of one head. Inside a key/value head, row `t * G + g` is head g
of its group at token t, and *entry* `(t * G + g) * C + j` is that row's j-th choice.

Counts that change from batch to batch are `do_not_specialize`: Triton would compile a kernel anew whenever one happens
to be 1 or a multiple of 16.
"""
