"""The engine of one device, which context parallelism replaces by its own."""

from torch import Tensor

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.shard import Shard


class LocalEngine(OperatorEngine):
    """Attention of all queries to all keys, which are on this device."""

    def shard(self, layout: Layout) -> Shard:
        """The whole sequence."""
        return Shard(self, layout)

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Selection]:
        """Summarizes all keys, selects for all queries, and attends once."""
        selection = attention.select(q_THD, attention.summarize(k_SKD, layout), layout)
        return (*attention.attend(q_THD, k_SKD, v_SKD, layout, selection), selection)

    def backward(
        self, state: BackwardState, selection: Selection, attention: LocalAttention, layout: Layout
    ) -> Gradients:
        """One backward pass over all keys."""
        return attention.attend_backward(state, layout, selection)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, attention: LocalAttention, layout: Layout) -> Selection:
        """The attention's own empty selection for the whole sequence."""
        return attention.empty_selection(q_THD, k_SKD, layout)


LOCAL_ENGINE = LocalEngine()
"""Holds no state but its observers, so all models of a process share it."""
