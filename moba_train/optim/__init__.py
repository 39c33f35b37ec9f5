"""Optimizers: from gradients to an update."""
