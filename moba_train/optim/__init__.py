"""From gradients to an update.

registry   the optimizers that a recipe can name
spec       what an optimizer must say about itself
adamw      AdamW with weight decay on matrices only
trainable  which parameters a stage trains
gradients  gradient norms over all ranks, and clipping
schedule   learning rate as a pure function of the tokens consumed
"""
