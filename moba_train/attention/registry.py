"""The attention kinds that a recipe may name. A new kind is its own folder or file, and one line here."""

from moba_train.attention.full.kind import FullKind
from moba_train.attention.gates.msa import MsaKind
from moba_train.attention.gates.seer import SeerKind
from moba_train.attention.infllm.kind import InfLLMKind
from moba_train.attention.infllm_v2.kind import InfLLMV2Kind
from moba_train.attention.kind import AttentionKind
from moba_train.attention.linear.kda import KdaKind
from moba_train.attention.linear.lightning import LightningKind
from moba_train.attention.moa.kind import MoaKind
from moba_train.attention.moba.kind import MobaKind
from moba_train.attention.moba_v05.kind import MobaV05Kind
from moba_train.attention.moba_v1.kind import MobaV1Kind
from moba_train.attention.nsa.kind import NsaKind
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
register(InfLLMV2Kind)
register(InfLLMKind)
register(MoaKind)
register(MobaV1Kind)
register(MobaV05Kind)
register(SeerKind)
register(MsaKind)
register(NsaKind)
register(LightningKind)
register(KdaKind)
