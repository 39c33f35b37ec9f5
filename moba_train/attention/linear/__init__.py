"""Kinds whose layers keep a state of fixed size in place of keys and values: linear attention.

lightning     the kind `lightning`: a constant decay for each head
kda           the kind `kda`: Kimi Delta Attention, a decay for each channel and the delta rule
decayed       linear attention with a constant decay, chunk by chunk in plain PyTorch
ranges        the token ranges and segments of a layer's rows, and what ranks tell each other about theirs
states        lightning's states that come from other ranks or from earlier calls of generation
delta         the delta rule with decays, token by token in plain PyTorch
delta_parts   the same part by part, for kernels that take many tensors
delta_states  its states that come from other ranks
convolution   short causal convolutions over packed documents, and their tails while tokens are generated
statistics    what a dump or a probe sees of states, decays and outputs
fla           what both kinds compute with the package fla-core on a GPU
"""
