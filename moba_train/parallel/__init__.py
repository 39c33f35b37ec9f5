"""Parallelism, applied to the model from outside.

world   process group and device of this rank
mesh    the device mesh of a recipe
fsdp    sharding, mixed precision, activation checkpointing and compilation of the model
"""
