"""Facet: attention to history blocks that the caller selects.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from moba_train.attention.layout import Layout
from moba_train.attention.protocol import Selection


class TakesSelection(ABC):
    """An attention for kinds whose selection has parameters or looks at more than keys."""

    @abstractmethod
    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The selection of these blocks, int32 [H, T, C], or [K, T, C] as the attention says: ascending ids of history
        blocks, -1 behind. Its shapes and dtypes are those of `empty_selection`."""
