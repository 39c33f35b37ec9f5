"""What a recipe costs before it runs: parameters, FLOPs, memory, time.

parameters   exact counts by part
documents    lengths of the documents in a stage's sequences
flops        per token, as dense causal attention and as what each layer really attends to
pipeline     layers of each rank of a pipeline, and how long ranks wait for each other
block        bytes of a block's activations
weights      weights, gradients and optimizer state of a rank
layer_memory  bytes of a rank's layers: what they keep, and what a block at work takes
moments      the moments of a step at which a rank can need most
memory       bytes per GPU by part at the peak of a step, an estimate
devices      memory and peak rates of known GPUs
activations  what each layer keeps for its backward pass, by the recipe's policy
plan         the plan of a recipe, from all of these
fit          whether it fits a GPU, and the cheapest changes that make it fit
render       the plan as tables
once         results that a plan asks for thousands of times
rates        what an H200 does in a second of a training step
attention_rates  what it does of each attention kind
layer_time   predicted seconds of one layer
step_time    predicted seconds of an optimizer step, and what travels in it
layouts      the best parallel layouts of a recipe on a number of nodes
render_layouts  these layouts as tables
summary      a run in a few lines, for the beginning of its output
"""
