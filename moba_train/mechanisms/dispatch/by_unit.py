"""Facet: attention one unit at a time, for a transport that sends queries to the owners of keys."""

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, Selection


class UnitQueries(NamedTuple):
    """Queries of single heads, from any tokens, with the earlier units that each attends to.

    All share one key/value head. Shape suffixes: F queries, C units of a query at most.
    """

    q_FD: Tensor
    units_FC: Tensor
    """int32: ids of the units, at least one for each query; -1 for none."""
    weights_FC: Tensor | None
    """Weight of each unit's result, see `UnitAttention`; None: joined by online softmax."""


class UnitAttention(ABC):
    """Attention to one unit at a time: what a transport needs that sends queries to the owners of keys.

    A unit is a block of `AttentionFacts.alignment` tokens, counted from its document's start; ids count over the packed
    sequence. Every query attends to its own unit, causally, and to the whole of those that `select` gives, all of them
    earlier in its document. Each unit gives a result with a softmax of its own, (out, lse), and these are **joined**:

    - By online softmax, as if one softmax ran over all keys: `select` returns (units,).
    - As a weighted sum with weights that are known before attention: `select` returns (units, weights), and
      out = sum of weight * out over the own unit and the selected ones. Ones add the results up; a softmax of gates
      weighs them by their gates. No gradient flows to the weights. `lse` is the log-sum-exp over all keys also here.

    The owner of some units joins their results; the parts of several owners are then joined by online softmax or added
    up. Keys, values and, for own units, queries are the rows of complete units: those of the layout's `k_ranges`, in
    their order.

    Shape suffixes: T queries, U rows of units, H query heads, K key/value heads, D head width, N units of the sequence,
    C selected earlier units, F gathered queries.
    """

    history_units: int
    """Earlier units that a query selects, at most."""

    @abstractmethod
    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """(units,) or (units, weights): int32 [H, T, C], ascending ids of the selected units and -1 behind; float
        [H, T, 1 + C], the weights of the own unit and of the selected ones, at least float32."""

    @abstractmethod
    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined."""

    @abstractmethod
    def first_tokens(self, layout: Layout) -> Tensor:
        """int [N]: first token of each unit in the packed sequence; its length for ids that name no unit."""

    @abstractmethod
    def attend_own(self, q_UHD: Tensor, k_UKD: Tensor, v_UKD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [U, H, D], lse [H, U]) of the queries of complete units over their own unit."""

    @abstractmethod
    def attend_own_backward(self, state: BackwardState, layout: Layout) -> Gradients:
        """(dq, dk, dv) of `attend_own`, dk and dv in float32 or better; the state's `out` and `lse` are the merged
        ones if units are joined by online softmax, else those of `attend_own`."""

    @abstractmethod
    def attend(self, queries: UnitQueries, k_UD: Tensor, v_UD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """(out [F, D], lse [F]) of the queries over their units, joined; all of these units are given."""

    @abstractmethod
    def attend_backward(
        self, queries: UnitQueries, merged: tuple[Tensor, Tensor, Tensor], k_UD: Tensor, v_UD: Tensor, layout: Layout
    ) -> Gradients:
        """(dq [F, D], dk [U, D], dv) of `attend`, dk and dv in float32 or better; `merged`: (dout [F, D], out [F, D],
        lse [F]) of the queries, joined over all their units, wherever these are."""


class OffersUnits(ABC):
    """An attention that says itself how it attends to one unit at a time."""

    @property
    @abstractmethod
    def by_unit(self) -> UnitAttention:
        """This attention, one unit at a time."""
