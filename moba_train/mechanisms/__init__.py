"""Every kind of attention other than `full` and `moba`, with its kernels, costs and probes.

Nothing in the core imports this folder; kinds and probes are found by name (entry points in pyproject.toml).
"""
