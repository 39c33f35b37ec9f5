"""MoBA's gate as Triton kernels: bit for bit the mean keys of ../gate.py, and its selection.

Imported only when used, so that moba_train needs no Triton.
"""

from moba_train.attention.moba.triton.pool import pool_keys
from moba_train.attention.moba.triton.select import select_blocks

__all__ = ["pool_keys", "select_blocks"]
