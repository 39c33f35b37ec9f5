"""From gradients to an update."""
