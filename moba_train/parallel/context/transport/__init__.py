"""Transports: how queries and keys of different ranks meet, one file for each.

base       the interface: shards in, shards out
allgather  every rank gathers all keys and values, in slices of heads
ring       keys and values travel around the ring of ranks; a rank attends to all at once, or to parts that it merges
ulysses    ranks exchange tokens for heads; with all-gather across nodes it is `hierarchical`
dispatch   queries travel to the ranks that own the keys they selected, and the results come back
"""
