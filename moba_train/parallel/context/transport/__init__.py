"""How queries and keys of different ranks come together, one file a way.

base       the contract: shards in, shards out
allgather  keys and values of all ranks gathered by slices of heads
ring       keys and values passed around, results merged
ulysses    tokens exchanged for heads; inside a node with all-gather across nodes: `hierarchical`
"""
