"""Attention on one device, or on any subset of the keys.

protocol   `LocalAttention` and `Layout`: all that context parallelism may know
kind       what an attention kind owns: its options, layer, costs and place in exports
registry   the kinds a recipe may name
call       one attention call: the attention, its layout, its observers
operators  attention as torch operators, and the base class of the engines that run them
local      the engine of one device
shard      the rows that a layer is given, and the way to the others: for kinds that need more than engine calls
observer   observers of an engine: a timer, and routing statistics of every selection
merge      partial results (out, lse) joined by online softmax
decoding   one new token at a time against cached keys
masked     exact attention under any mask, a chunk of queries at a time: the references are built from it
varlen     kernels for attention inside many segments at once, from several libraries
blocks     attention to selected blocks, for any selector
full       full attention: dense, causal
moba       Mixture of Block Attention: a gate that selects blocks
linear     kinds with a state of fixed size in place of keys and values: lightning, kda
"""
