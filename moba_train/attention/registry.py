"""The attention kinds that a recipe may name. A new kind is its own folder or file, and one line here."""

from moba_train.attention.full.kind import FullKind
from moba_train.attention.kind import AttentionKind
from moba_train.attention.linear.kda import KdaKind
from moba_train.attention.linear.lightning import LightningKind
from moba_train.attention.moba.kind import MobaKind
from moba_train.config.attention import register_kind_options

KINDS: dict[str, type[AttentionKind]] = {}
"""By name."""


def register(kind: type[AttentionKind]) -> type[AttentionKind]:
    """Make `kind` known to recipes, models and plans. Usable as a decorator."""
    KINDS[kind.name] = kind
    register_kind_options(kind.name, kind.Options)
    return kind


register(FullKind)
register(MobaKind)
register(LightningKind)
register(KdaKind)
