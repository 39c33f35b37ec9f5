"""The attention kinds that a recipe may name: entry points of the group `moba_train.attention_kinds`."""

from typing import cast

from moba_train import registry
from moba_train.attention.kind import AttentionKind

KINDS = cast(registry.Registry[type[AttentionKind]], registry.ATTENTION_KINDS)
"""Attention kinds by name."""
