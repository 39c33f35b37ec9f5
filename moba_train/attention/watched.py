"""Watching one layer: an engine in the place of its own, which collects the layer's statistics."""

import math
from contextlib import AbstractContextManager

from torch import Tensor

from moba_train.attention.observer import AttentionObserver
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import Layout, LocalAttention, Selection
from moba_train.attention.shard import ObservedShard, ShardCall, ShardObserver
from moba_train.attention.statistics import Statistics


class WatchedEngine(AttentionObserver, ShardObserver):
    """Runs one layer's attention through another engine, and adds up what can be seen of it. An `Engine`.

    Values are read from the device as they come. Of a layer that torch.compile has compiled, it must run the code
    uncompiled (`torch.compiler.set_stance`).
    """

    def __init__(self, engine: OperatorEngine) -> None:
        self._engine = engine
        self.statistics = Statistics()
        """The statistics of all calls that were seen so far."""

    def __call__(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout, /
    ) -> tuple[Tensor, Tensor]:
        """The engine's result."""
        with self._engine.observe(self):
            return self._engine(q_THD, k_SKD, v_SKD, attention, layout)

    def shard(self, layout: Layout, /) -> ObservedShard:
        """The engine's shard, observed."""
        return ObservedShard(self._engine.shard(layout), self)

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Adds the description of the selection."""
        self.statistics.add(attention.describe_selection(selection, layout))

    def attended(self, lse_HT: Tensor) -> None:
        """Adds the largest log-sum-exp; nothing where no query sees a key."""
        largest = lse_HT.max().item() if lse_HT.numel() else -math.inf
        if largest != -math.inf:
            self.report(Statistics({"max_lse": largest}))

    def attending(self, call: ShardCall) -> AbstractContextManager[object]:
        """Sees the engine's call inside."""
        return self._engine.observe(self)

    def could_select(self, call: ShardCall) -> None:
        """Adds the description of these blocks."""
        assert call.selected_HnC is not None
        self.selected(call.attention, (call.selected_HnC,), call.layout)

    def report(self, statistics: Statistics) -> None:
        """Adds what the kind says."""
        self.statistics.add(statistics)
