"""Mixture of Attention spans (Fu et al. 2024, arXiv:2406.14909): a sliding window for each head, fixed in the recipe.

spans      which blocks a head's queries attend to, and how many pairs that is
attention  its LocalAttention
kind       what a recipe's `kind: moa` names
influence  what the loss would change by if attention to a block were masked, for choosing spans
"""
