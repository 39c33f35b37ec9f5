"""The attention kinds that a recipe may name: entry points of the group `moba_train.attention_kinds`."""

from typing import cast

from moba_train import registry
from moba_train.attention.kind import AttentionKind

KINDS = cast(registry.Registry[type[AttentionKind]], registry.ATTENTION_KINDS)
"""By name."""


def register(kind: type[AttentionKind]) -> type[AttentionKind]:
    """Make `kind` known in this process alone. Usable as a decorator."""
    KINDS.register(kind.name, kind)
    return kind
