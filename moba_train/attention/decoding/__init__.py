"""Attention of one new token at a time to cached keys."""

from moba_train.attention.decoding.cached import CachedKeys, last_tokens

__all__ = ["CachedKeys", "last_tokens"]
