"""Observers of an engine: what attention does, looked at from outside.

An observer sees each of the local functions (`summarize`, `select`, `attend`, `attend_backward`) as it runs, each
selection once it is made, and the result of each call. Communication between them is not seen.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width, C selected blocks of a query.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from moba_train.attention.facets import Probed
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention, Selection
from moba_train.attention.statistics import Statistics, joined


class AttentionCall(NamedTuple):
    """One attention call of a layer on this rank."""

    q_THD: Tensor
    k_SKD: Tensor
    v_SKD: Tensor
    attention: LocalAttention
    layout: Layout
    selected_HTC: Tensor | None = None
    """int32: the history blocks that the kind gives the attention; None if it gives none."""
    has_all_keys: bool = False
    """True for a call of `Shard.attend`: keys and values are those of all tokens, and the layout is the shard's."""


class Observer:
    """Base class: an observer that does nothing."""

    def around(self, function: str) -> AbstractContextManager[object]:
        """The context in which the local function of this name runs."""
        return nullcontext()

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Called after `attention` made a selection for the queries of `layout`."""

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Called after a call, with its results over all keys that the queries attend to."""


class StatisticsObserver(Observer):
    """Collects the statistics of a layer. Values are read from the device as they come."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        """Statistics of all calls so far."""

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Adds the description of the selection, if the attention has one."""
        if isinstance(attention, Probed):
            self.report(attention.describe_selection(selection, layout))

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Adds the largest log-sum-exp; nothing if no query sees a key."""
        largest = lse_HT.max().item() if lse_HT.numel() else -math.inf
        if largest != -math.inf:
            self.report(Statistics({"max_lse": largest}))

    def report(self, statistics: Statistics) -> None:
        """Adds statistics; kinds call it with what only they can see, such as states and gates of their own."""
        self.statistics = joined([self.statistics, statistics])


def show(engine: Any, out_THD: Tensor, lse_HT: Tensor, *call: Any) -> None:
    """Show a call, given as the fields of an `AttentionCall`, to the engine's observers; not in compiled code, which a
    guard on these would compile again."""
    if not torch.compiler.is_compiling():
        for observer in engine.observers:
            observer.attended(AttentionCall(*call), out_THD, lse_HT)


def statistics_observer(engine: Any) -> StatisticsObserver | None:
    """The watch among the observers, to which kinds report; None if there is none, and in compiled code."""
    observers = () if torch.compiler.is_compiling() else engine.observers
    return next((observer for observer in observers if isinstance(observer, StatisticsObserver)), None)


SomeObserver = TypeVar("SomeObserver", bound=Observer)


@contextmanager
def observing(engine: Any, observer: SomeObserver) -> Iterator[SomeObserver]:
    """Inside, `observer` sees all attention that this engine runs, on any thread of this process."""
    engine.observers = (*engine.observers, observer)
    try:
        yield observer
    finally:
        engine.observers = tuple(other for other in engine.observers if other is not observer)


LOCAL_FUNCTIONS = {n: n for n in ("summarize", "select", "attend", "attend_backward")} | {"given_selection": "select"}
"""Functions of an attention that are observed, and their names for observers."""


class Observed:
    """An object with functions of an attention, which observers see; all else is the object's own."""

    def __init__(
        self, functions: Any, attention: LocalAttention, observers: tuple[Observer, ...], names: Mapping[str, str]
    ) -> None:
        """`attention`: to which observers count the functions. `names`: the observed ones, each with its name there."""
        self._functions = functions
        self.attention = attention
        self.observers = observers
        self._names = names

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._functions, name)
        return partial(self._run, name, member) if name in self._names else member

    def _run(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        with ExitStack() as contexts:
            for observer in self.observers:
                contexts.enter_context(observer.around(self._names[name]))
            result = function(*arguments)
        if self._names[name] == "select":
            for observer in self.observers:
                observer.selected(self.attention, result, arguments[-1])  # the layout
        return result


def observed(attention: LocalAttention, observers: tuple[Observer, ...]) -> LocalAttention:
    """The attention for an engine to run, seen by the observers if there are any."""
    return cast(LocalAttention, Observed(attention, attention, observers, LOCAL_FUNCTIONS)) if observers else attention
