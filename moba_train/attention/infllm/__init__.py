"""InfLLM (Xiao et al. 2024, arXiv:2402.04617): a trained model reads beyond its length, without training.

memory  attention to what lies before the window: representative keys of blocks, the best blocks, one relative position
kind    what a recipe's `kind: infllm` names: window (../window.py) and memory, under one softmax

Nothing here has a gradient.
"""
