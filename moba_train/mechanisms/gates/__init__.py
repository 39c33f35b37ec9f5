"""Kinds with a gate that is distilled from full attention: SeerAttention and MiniMax Sparse Attention."""
