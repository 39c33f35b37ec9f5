"""Context parallelism: one packed sequence over several ranks. It moves the context; what attends knows nothing of it.

layout     who holds which tokens
copies     rows copied in large words
comm       collectives and messages: the only file that calls torch.distributed for them
units      units that straddle shards, summarised whole by one rank
transport  allgather, ring, ulysses, hierarchical
batch      a micro-batch cut over ranks
choose     what is possible, what it costs, what `auto` takes
engine     the attention engine a model is given
"""
