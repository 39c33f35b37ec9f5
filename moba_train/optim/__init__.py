"""From gradients to an update.

adamw      AdamW with weight decay on matrices only
gradients  gradient norms over all ranks, and clipping by them
schedule   learning rate as a pure function of the tokens consumed
"""
