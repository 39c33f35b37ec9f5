"""Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089): compressed, selected and sliding-window attention.

kind        what a recipe's `kind: nsa` names: options, costs, and the three branches with their gates
parameters  the gates, the compression of keys and values, the branches' own projections
geometry    which tokens are in which compressed block, and which queries see it
compressed  attention to compressed blocks, as a LocalAttention
selection   which blocks the selected branch attends to, from the compressed branch's probabilities
kernel      these probabilities on a GPU
operators   what follows from a layout, and that choice, as torch operators: the graph is traced as a whole

The selected branch is ../blocks/given.py, the window ../window.py.
"""
