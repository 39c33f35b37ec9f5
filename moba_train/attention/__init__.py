"""Attention on one device, or on any subset of the keys.

protocol    `LocalAttention` and `Layout`: all that context parallelism may know
registry    the kinds a recipe may name
operators   attention as torch operators, and the engines that run them
named       objects that these operators refer to by name
clock       how long attention computes, measured only while somebody asks
choices     what attention chose, as numbers for people
local       the engine of one device
merge       partial results (out, lse) joined by online softmax
masked      exact attention under any mask, a chunk of queries at a time: what the references are built from
varlen      kernels for attention inside many segments at once, from several libraries
dense       the kernels behind dense causal attention
pieces      which calls of such a kernel make up the attention between two shards
full        dense causal attention
moba        Mixture of Block Attention
"""
