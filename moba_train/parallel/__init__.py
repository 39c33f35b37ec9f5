"""Parallelism, applied to the model from outside."""
