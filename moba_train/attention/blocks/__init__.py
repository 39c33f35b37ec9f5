"""Attention to selected blocks: what every block-sparse kind is built on. A selector says which blocks.

attention     `BlockAttention`: takes selected block ids from any selector, and attends
given         `GivenBlocks`: as a `LocalAttention`, for kinds that select outside of it
summed        `SummedBlocks`: a softmax for each block, and the results added up
shared        `SharedBlocks`: for selections that the query heads of a group share, in less memory, and local blocks
spans         local blocks, and all blocks of queries near a document's start: one span of neighbouring keys
dense_or_sparse  base class: full attention where no block can be left out
choose        the blocks with the highest scores, for kinds that score all of them
statistics    what selections tell: the share of the keys, and how the selected blocks are spread
geometry      which tokens are in which block
available     whether the Triton kernels can run
backends      which of these a call gets:
reference     plain PyTorch
composed      the paper's composition of calls of a varlen flash kernel
joins         how the composition joins the results of a query's blocks: one softmax over all keys, or a sum
sorted_parts  what the composition sorts, gathers and joins, in plain PyTorch (triton/gathered.py has kernels for it)
by_unit       attention to one block at a time, for queries gathered from anywhere
triton        GPU kernels
"""
