"""The engine of one device, which context parallelism replaces by its own."""

from torch import Tensor

from moba_train.attention.call import AttentionCall
from moba_train.attention.operator_shard import OperatorShard
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import BackwardState, Gradients, Layout, Selection


class LocalEngine(OperatorEngine):
    """Attention of all queries to all keys, which are on this device."""

    def shard(self, layout: Layout) -> OperatorShard:
        """The whole sequence."""
        return OperatorShard(self, layout)

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, call: AttentionCall
    ) -> tuple[Tensor, Tensor, Selection]:
        """Summarizes all keys, selects for all queries, and attends once."""
        selection = call.select(q_THD, call.summarize(k_SKD))
        return (*call.attend(q_THD, k_SKD, v_SKD, selection), selection)

    def backward(self, state: BackwardState, selection: Selection, call: AttentionCall) -> Gradients:
        """One backward pass over all keys."""
        return call.attend_backward(state, selection)

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, call: AttentionCall) -> Selection:
        """The attention's own empty selection for the whole sequence."""
        return call.empty_selection(q_THD, k_SKD)


LOCAL_ENGINE = LocalEngine()
"""Holds no state but its observers, so all models of a process share it."""
