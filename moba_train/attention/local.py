"""Run a LocalAttention on one device: the engine that context parallelism replaces by its own."""

from torch import Tensor

from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import Layout, LocalAttention, Plan


class LocalEngine(OperatorEngine):
    """Attention of all queries to all keys, which are here."""

    def forward(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor, Plan]:
        """See `OperatorEngine.forward`."""
        plan = attention.plan(q_THD, attention.summarize(k_SKD, layout), layout)
        return (*attention.attend(q_THD, k_SKD, v_SKD, layout, plan), plan)

    def backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        plan: Plan,
        attention: LocalAttention,
        layout: Layout,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `OperatorEngine.backward`."""
        return attention.attend_backward(dout_THD, q_THD, k_SKD, v_SKD, out_THD, lse_HT, layout, plan)

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, attention: LocalAttention, layout: Layout) -> Plan:
        """See `OperatorEngine.empty_plan`."""
        return attention.empty_plan(q_THD, k_SKD, layout)


_ENGINE = LocalEngine()


def run_local(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, attention: LocalAttention, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Attention of all given queries to all given keys; see `OperatorEngine.__call__`."""
    assert layout.is_whole, "parts of a sequence need context parallelism's engine"
    return _ENGINE(q_THD, k_SKD, v_SKD, attention, layout)
