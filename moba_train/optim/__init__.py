"""From gradients to an update.

registry       the optimizers that a recipe can name
spec           what an optimizer must say about itself
adamw          AdamW with weight decay on matrices only, and its implementations
kernel_adamw   what implementations by other packages' kernels have in common
adamw_fused    by NVIDIA apex or Transformer Engine, on a GPU
adamw_cpu      by DeepSpeed, state and update in host memory
muon           Muon for the blocks' matrices, AdamW for the rest
newton_schulz  orthogonalizes a matrix
exchange       gathers whole matrices from their shards and scatters results
local          this rank's part of a sharded tensor
trainable      which parameters a stage trains
gradients      gradient norms over all ranks, and clipping
schedule       learning rate as a pure function of the tokens consumed
"""
