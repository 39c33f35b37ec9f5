"""InfLLM (Xiao et al. 2024, arXiv:2402.04617): a trained model reads beyond its length, without training.

window  attention to the tokens just before a query
memory  attention to what lies before the window: representative keys of blocks, the best blocks, one relative position
kind    what a recipe's `kind: infllm` names: both, under one softmax

Nothing here has a gradient.
"""
