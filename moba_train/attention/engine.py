"""Engines: what runs the attention of layers.

Shape suffixes: L rows of this rank, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from moba_train.attention.handles import Handled
from moba_train.attention.layout import Layout
from moba_train.attention.observer import Observer, show
from moba_train.attention.operators import attention_operator
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.shard import Shard


class Engine(ABC):
    """Runs the attention of layers: on one device, over all ranks of context parallelism, or against a cache."""

    observers: tuple[Observer, ...] = ()

    @abstractmethod
    def __call__(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(out [L, H, D], lse [H, L]) of q over k, v [L, K, D]; `layout`: of the whole sequence; `sink` [H] or none."""

    @abstractmethod
    def shard(self, layout: Layout) -> Shard:
        """The part of a packed sequence with this layout that this engine gives a layer."""


class OperatorEngine(Engine, Handled):
    """Runs a LocalAttention by the operators, on one device. One that is `AcrossRanks` too runs it on many."""

    def __call__(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of the given queries, differentiable in q, k, v, of one floating dtype, and the sink; K divides H.
        `lse`, the natural logarithm, `summarize` and `select` have no gradient; both results are contiguous; second
        derivatives are a NotImplementedError."""
        assert layout.is_whole, "the layout of the whole packed sequence is needed, not that of a part"
        where = layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total, None
        handles = attention.handle, self.handle
        # Continues in `operators._attend`.
        out_LHD, lse_HL, *_ = attention_operator()(q_LHD, k_LKD, v_LKD, None, *(sink or [None]), *where, *handles)
        show(self, out_LHD, lse_HL, q_LHD, k_LKD, v_LKD, attention, layout)
        return out_LHD, lse_HL

    def shard(self, layout: Layout) -> Shard:
        """The whole sequence."""
        return Shard(self, layout)


LOCAL_ENGINE = OperatorEngine()
"""The engine of one device. Holds no state but its observers, so all models of a process share it."""
