"""The attention kinds a recipe may name. A new kind is its own file and one line here."""

from moba_train.attention.full import FullAttention
from moba_train.attention.moba.attention import MobaAttention
from moba_train.attention.protocol import LocalAttention

KINDS: dict[str, type[LocalAttention]] = {
    "full": FullAttention,
    "moba": MobaAttention,
}
