"""Facets: what a selection tells to evaluations, and what a gate selects and how it scores.

Shape suffixes: T queries, n some of them, N blocks, H query heads, K key/value heads, D head width, C selected blocks.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from moba_train.attention.layout import Layout
from moba_train.attention.protocol import Selection
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
