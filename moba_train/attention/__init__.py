"""Attention on one device, or on any subset of the keys.

protocol   `LocalAttention` and `Layout`: all that context parallelism may know
kind       what an attention kind owns: its options, layer, costs and place in exports
registry   the kinds a recipe may name
by_unit    attention one unit at a time, which some attentions offer to the transport `dispatch`
call       one attention call: the attention, its layout, its observers
operators  attention as torch operators, and the base class of the engines that run them
local      the engine of one device
shard      the rows that a layer is given, and the way to the others: for kinds that need more than engine calls
operator_shard  the shard of these engines
previous   the rows of the tokens before each token, for short convolutions
observer   observers of an engine: the base class, and a timer
statistics  what can be seen of a layer's attention: names, meanings, and how numbers are added up
watched    an engine that collects a layer's statistics
merge      partial results (out, lse) joined by online softmax
decoding   one new token at a time against cached keys
masked     exact attention under any mask, a chunk of queries at a time: the references are built from it
varlen     kernels for attention inside many segments at once, from several libraries
blocks     attention to selected blocks, for any selector
full       full attention: dense, causal
gates      kinds with a gate of their own, distilled from full attention: seer, msa
moba       Mixture of Block Attention: a gate that selects blocks
infllm     InfLLM: a window and a memory of blocks, for evaluation and generation
infllm_v2  InfLLM-V2: dense attention that becomes block-sparse for long documents
moa        Mixture of Attention spans: a window of its own for each head
moba_v1    MoBA's first parallel version: a softmax for each selected block, results added up
moba_v05   MoBA's serial version: own segment, then a sublayer of cross attention to earlier ones
window     sliding-window attention
nsa        Native Sparse Attention: compressed, selected and sliding-window attention with gates
linear     kinds with a state of fixed size in place of keys and values: lightning, kda
"""
