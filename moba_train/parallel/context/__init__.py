"""Context parallelism: one packed sequence sharded over several ranks, for any attention.

layout     which rank holds which tokens
batch      a rank's shard of a micro-batch
strategy   the data of a strategy: ranks, transport, layout, slices, buffers
checks     strategies that are impossible
costs      the predicted cost of a strategy
policy     the strategy that `auto` takes
copies     copies of rows in 16-byte words
comm       collectives and messages: the only file that calls torch.distributed for them
units      the owners of units of keys that straddle shards, and rows on their way to them
summaries  summaries of all keys, from the ranks' shards of keys
transport  allgather, ring, ulysses, hierarchical, dispatch
shard      one rank's rows, for attention kinds that gather what they need
engine     the attention engine that a model is given
"""
