"""The contract between attention and context parallelism.

An attention knows nothing of ranks; context parallelism knows nothing of blocks. They meet in four functions, called in
order: `summarize` each shard of keys, `select` from all summaries, `attend` to any subsets of the keys (merging the
partial results by online softmax, kernels/common/merge.py), and `attend_backward` with the merged results. A fifth one,
`empty_selection`, gives the shapes that torch.compile's tracing needs. What only some attentions can do are facets.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from moba_train.attention.handles import Handled
from moba_train.attention.layout import Layout

Selection = tuple[Tensor, ...]
"""Result of `select`, opaque to its callers; saved for the backward pass and for recomputation."""


class BackwardState(NamedTuple):
    """The tensors of a backward pass: dout, q and out [T, H, D], k and v [S, K, D], lse [H, T].

    `out` and `lse` are merged over all keys: around a ring, they come from more keys than `k` and `v` hold.
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def part(
        self, rows: slice = slice(None), heads: slice = slice(None), kv_heads: slice = slice(None)
    ) -> "BackwardState":
        """Some rows of the queries and of their results, some query heads, and the key/value heads that these share;
        `lse` becomes contiguous."""
        return BackwardState(
            self.dout[rows, heads],
            self.q[rows, heads],
            self.k[:, kv_heads],
            self.v[:, kv_heads],
            self.out[rows, heads],
            self.lse[heads, rows].contiguous(),
        )


def head_parts(heads: int, kv_heads: int, together: int) -> Iterator[tuple[slice, slice]]:
    """(query heads, the key/value heads that they share), `together` of the latter at a time, at least one."""
    group = heads // kv_heads
    for first in range(0, kv_heads, max(1, together)):
        stop = min(first + max(1, together), kv_heads)
        yield slice(first * group, stop * group), slice(first, stop)


Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv), shapes and dtypes of q, k and v."""


class AttentionFacts(NamedTuple):
    """Properties of an attention that engines need before any tensor exists."""

    alignment: int = 1
    """Tokens of a unit, counted from each document's start. `summarize` must be given whole units; the last unit of a
    document may be short."""
    couples_heads: bool = False
    """True if the query heads that share a key/value head select together, and so must be given together."""
    work_grows: bool = True
    """True if a query's work grows with its position, so that equal ranges of a sequence are unequal work."""
    merges: bool = True
    """True if results over disjoint keys merge by online softmax into the result over all. Otherwise `attend` must be
    given all keys at once, and `attend_backward` ignores the state's `out` and `lse`."""
    exchange: Any = None
    """Its own exchange of few keys between ranks, as `mechanisms/window_edges.py` has it; None: the transport's."""


class LocalAttention(Handled, ABC):
    """Causal self-attention over any subset of a packed sequence's keys.

    Dtypes: q, k, v, dout and all results but `lse` share one floating dtype; `lse` is the natural log-sum-exp of the
    scaled scores in float32 (float64 for float64 input), and a row without any key gives out = 0, lse = -inf.
    """

    facts: AttentionFacts = AttentionFacts()

    def __init_subclass__(cls) -> None:
        """Raises TypeError for a class that selects by half: a forgotten `select` would select nothing, silently."""
        super().__init_subclass__()
        names = ("select", "empty_selection", "summarize")
        own = [name for name in names if getattr(cls, name) is not getattr(LocalAttention, name)]
        if own and own[:2] != ["select", "empty_selection"]:
            raise TypeError(f"{cls.__name__}: given {' and '.join(own)}; allowed: none, or select and empty_selection")

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor | None:
        """Summary of the keys for `select`, [units, K, ...], or None, the default. Carries no gradient.

        One row for every unit of the packed sequence, in its order, zero for units of which no key is given: the sum of
        what holders of different units compute is the summary of the sequence. Key/value heads do not mix, here or
        below: a slice of them is the summary of that slice.
        """
        return None

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Decide, for each query, what it attends to, given all summaries. By default, nothing."""
        return ()

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined: for torch.compile's tracing."""
        return ()

    @abstractmethod
    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) of these queries over these keys, as far as `selection` and causality allow."""

    @abstractmethod
    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """Gradients (dq, dk, dv) of `attend`; the state's `out` and `lse` are merged over all keys, not only these."""
