"""One model taken through the stages of a recipe.

trainer      the one training loop
progress     how far a run has come: what a checkpoint stores besides tensors
checkpoints  saving, resuming and going back
recovery     acting on a loss spike
throughput   tokens per second, memory, MFU
determinism  `deterministic: true`
"""
