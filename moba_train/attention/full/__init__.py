"""Full attention: dense, causal, over packed documents.

kind       what a recipe's `kind: full` names
attention  its LocalAttention
calls      the kernel calls that make up the attention between two shards
kernels    the kernels behind them
"""

from moba_train.attention.full.attention import FullAttention

__all__ = ["FullAttention"]
