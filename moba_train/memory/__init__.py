"""Bytes and operations of a stage: what fits a GPU, what is kept, recomputed and offloaded."""
