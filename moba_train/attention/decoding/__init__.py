"""Attention of one new token at a time to cached keys.

cached  the keys and values of several sequences so far
kernel  a Triton kernel that reads all keys of a sequence, or those of listed blocks
"""

from moba_train.attention.decoding.cached import CachedKeys, kernel_decodes, last_tokens

__all__ = ["CachedKeys", "kernel_decodes", "last_tokens"]
