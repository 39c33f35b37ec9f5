"""The kind `moba`: what a recipe, a plan and an export need to know about Mixture of Block Attention."""

from moba_train.attention.kernels.common.selection import SELECTION
from moba_train.attention.kind import (
    AttentionKind,
    KindFacts,
)
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.statistics import SOFTMAX


class MobaKind(AttentionKind):
    """Each query and head attends to its own block and to its top-k blocks of history."""

    name = "moba"
    statistics = SOFTMAX | SELECTION
    Options = MobaAttention.Options
    # A model with `key_conv` is not exported at all.
    facts = KindFacts(frozenset({"backend", "key_conv"}), takes_sink=True)
