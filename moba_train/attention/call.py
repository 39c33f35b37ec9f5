"""One attention call of an engine: the attention, the layout that its functions are given, and who observes them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from moba_train.attention.by_unit import UnitCall
from moba_train.attention.observer import AttentionObserver
from moba_train.attention.protocol import BackwardState, Gradients, Layout, LocalAttention, Selection, TokenRanges


@dataclass(frozen=True)
class AttentionCall:
    """The local functions of an attention, on one layout.

    Engines and transports call the attention through it alone, so that observers see every call.
    """

    attention: LocalAttention
    layout: Layout
    observers: tuple[AttentionObserver, ...] = ()

    def part(self, q_ranges: TokenRanges | None, k_ranges: TokenRanges | None) -> "AttentionCall":
        """The call for these queries and keys of the sequence; None: all of them."""
        return replace(self, layout=self.layout.part(q_ranges, k_ranges))

    def summarize(self, k_SKD: Tensor) -> Tensor | None:
        """`LocalAttention.summarize` of the layout's keys."""
        with self.observed("summarize"):
            return self.attention.summarize(k_SKD, self.layout)

    def select(self, q_THD: Tensor, summaries: Tensor | None) -> Selection:
        """`LocalAttention.select` for the layout's queries."""
        return self.observed_selection(lambda: self.attention.select(q_THD, summaries, self.layout))

    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor) -> Selection:
        """`LocalAttention.given_selection` for the layout's queries."""
        selection = self.attention.given_selection(selected_HTC, q_THD, k_SKD, self.layout)
        for observer in self.observers:
            observer.selected(self.attention, selection, self.layout)
        return selection

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor) -> Selection:
        """`LocalAttention.empty_selection`: shapes and dtypes of what `select` returns. Not observed."""
        return self.attention.empty_selection(q_THD, k_SKD, self.layout)

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        """`LocalAttention.attend` of the layout's queries to its keys."""
        with self.observed("attend"):
            return self.attention.attend(q_THD, k_SKD, v_SKD, self.layout, selection)

    def attend_backward(self, state: BackwardState, selection: Selection) -> Gradients:
        """`LocalAttention.attend_backward` of the layout's queries and keys."""
        with self.observed("attend_backward"):
            return self.attention.attend_backward(state, self.layout, selection)

    @property
    def by_unit(self) -> UnitCall:
        """The call, one unit at a time, of an attention that offers it."""
        attention = self.attention.by_unit
        assert attention is not None, "ask `LocalAttention.by_unit` first"
        return UnitCall(self, attention)

    def observed_selection(self, select: Callable[[], Selection]) -> Selection:
        """The result of `select`, which every observer is shown."""
        with self.observed("select"):
            selection = select()
        for observer in self.observers:
            observer.selected(self.attention, selection, self.layout)
        return selection

    def observed(self, function: str) -> AbstractContextManager[object]:
        """The contexts of all observers around a function."""
        if not self.observers:
            return nullcontext()
        contexts = ExitStack()
        for observer in self.observers:
            contexts.enter_context(observer.around(function))
        return contexts
