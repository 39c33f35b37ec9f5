"""Parallelism, applied to the model from outside.

world     process group and device of this rank
attempt   the ranks that torchrun restarts find each other
run_lock  one run at a time in a run folder
failures  which rank ended the run, and in what
mesh      the device mesh that the weights are sharded over
tensor    heads and columns of the layers shared by the ranks of a node
forward   the only calls of the model, one function for each use
fsdp      sharding, mixed precision, activation checkpointing and compilation of the model
strategy  the context-parallel strategy of a stage, from the recipe
stage     a rank's share in a stage: which sequences, which of their tokens, what attends
context   context parallelism
"""
