"""Parallelism, applied to the model from outside.

world           process group and device of this rank
restart         the ranks that torchrun restarts find each other
run_lock        one run at a time in a run folder
failures        which rank ended the run, and why
dims            the device mesh, the coordinates of every rank in it, and every process group
links           the links between GPUs, and what collectives send through them
pipeline        layers over ranks: parts of the model, and the schedules of their passes
tensor          heads and columns of the layers over the ranks of a node
forward         the only calls of the model, one function for each use
float8          linear layers in FP8, by torchao
float8_weights  weights that are gathered in FP8, cast once a step
float8_nvidia   the same by NVIDIA's Transformer Engine
norms           RMS norms by NVIDIA apex
activations     what each block keeps for its backward pass, and the compilation of the blocks
offload         saved tensors in host memory until the backward pass
page_locked     host memory that GPUs copy to and from while they compute
gpu_memory      how torch takes memory from a GPU
fsdp            sharding and mixed precision of the model
reduction       FSDP's sums of gradients that travel in the compute dtype
copy_engines    FSDP's transfers by the copy engines of GPUs
stage           a rank's data shard in a stage: its sequences, its tokens of them, the engine of its attention
stage_strategy  the context-parallel strategy of a stage, from the recipe
context         context parallelism
"""
