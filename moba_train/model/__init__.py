"""The model on one device: no torch.distributed here.

transformer  a Llama-style decoder; the attention kinds of its layers are set from outside
rope         rotary position embedding
loss         output projection and cross entropy on loss tokens, a chunk at a time
watch        attention of the layers, watched
build        attention objects from a recipe's layers; initial weights
"""
