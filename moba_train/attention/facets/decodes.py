"""Facet: attention of the newest tokens to cached keys, with code of its own.

Shape suffixes: B sequences, H query heads, D head width.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.protocol import LocalAttention


class Decodes(ABC):
    """An attention that decodes by itself; any other is decoded by `decode_as_trained`."""

    @abstractmethod
    def decode(self, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each cached sequence, over the sequence's keys.

        Equal to the last row of attention to the complete sequence.
        """


def decode_as_trained(attention: LocalAttention, q_BHD: Tensor, cached: CachedKeys) -> tuple[Tensor, Tensor]:
    """`Decodes.decode` by the functions of training, on a packed copy of the caches if there are several sequences."""
    selection = attention.select(q_BHD, cached.summaries, cached.layout)
    return attention.attend(q_BHD, cached.packed_keys(), cached.packed_values(), cached.layout, selection)
