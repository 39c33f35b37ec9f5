"""MoBA's first parallel version: each selected block has a softmax of its own, and the results are added up.

attention  `SummedMoba`, its LocalAttention
kind       what a recipe's `kind: moba_v1` names
"""
