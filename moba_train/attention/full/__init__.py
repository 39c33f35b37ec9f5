"""Full attention: dense, causal, over packed documents."""

from moba_train.attention.full.full_kind import FullAttention

__all__ = ["FullAttention"]
