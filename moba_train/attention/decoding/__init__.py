"""Attention of one new token at a time to cached keys."""

from moba_train.attention.decoding.cached import CachedKeys, kernel_decodes, last_tokens

__all__ = ["CachedKeys", "kernel_decodes", "last_tokens"]
