"""Abilities that only some attentions have: each facet is a class that such an attention also inherits from.

Shape suffixes: B sequences, T queries, n some of them, S keys, N blocks, H query heads, K key/value heads, D head
width, C selected blocks of a query.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from moba_train.attention.kernels.common.cached_keys import CachedKeys
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention, Selection
from moba_train.attention.statistics import Statistics


class SelectedBlocks(NamedTuple):
    """The history blocks that queries attend to, in addition to their own."""

    ids_HnC: Tensor
    """int32 [H, n, C], [1, n, C] or [K, n, C]: ids as in kernels/common/geometry.py, ascending, -1 behind."""
    block_size: int
    """Tokens of a block."""


class Probed(ABC):
    """An attention whose selections can be described."""

    @abstractmethod
    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """Statistics of a selection of the layout's queries (`statistics.SELECTION`)."""

    @abstractmethod
    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks | None:
        """The blocks of some of the layout's queries; None: every query attends to its complete history."""


class Gate(NamedTuple):
    """The blocks that a gate selects, and the scores by which it selects them."""

    selected: SelectedBlocks
    scores: Tensor | None
    """[H, T, N] in the units of attention's scaled scores, or [K, T, N] if query heads that share a key/value head
    select together; None: a block has no score of its own."""


class Gated(ABC):
    """An attention that selects blocks by a gate, which can be asked without attending."""

    @abstractmethod
    def gate(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Gate | None:
        """The gate of the layout's queries, wherever in the sequence these are; None: everything is selected."""


class TakesSelection(ABC):
    """An attention for kinds whose selection has parameters or looks at more than keys."""

    @abstractmethod
    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The selection of these blocks, int32 [H, T, C], or [K, T, C] as the attention says: ascending ids of history
        blocks, -1 behind. Its shapes and dtypes are those of `empty_selection`."""


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
