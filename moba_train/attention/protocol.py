"""The contract between attention and context parallelism.

An attention knows nothing of ranks; context parallelism knows nothing of blocks. They meet in five functions, called in
order: `summarize` each shard of keys, `plan` from all summaries, `attend` to any subsets of the keys (merging the
partial results by online softmax, see merge.py), and `attend_backward` with the merged results.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from moba_train.attention.named import Registry
from moba_train.config.base import Section

Plan = tuple[Tensor, ...]
"""What `plan` decided, opaque to everyone else; saved for the backward pass and for recomputation."""


Runs = tuple[tuple[int, int], ...]
"""Half-open ranges (start, stop) of indices in the packed sequence, ascending and disjoint: what a shard is made of."""


def joined(ranges: Iterable[tuple[int, int]]) -> Runs:
    """The same tokens as ascending ranges, adjacent ones merged, empty ones dropped."""
    runs: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start == stop:
            continue
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)


@dataclass(frozen=True)
class Layout:
    """Where the given queries and keys stand in one packed sequence.

    Everything follows from a token's index in the packed sequence and the document boundaries, so nobody guesses
    positions from a local row number.
    """

    cu_seqlens: Tensor
    """int32 [docs + 1]: document boundaries in the packed sequence; first 0, last its length.

    Not to be edited while the layout is in use: what follows from it is kept."""
    max_seqlen: int
    """An upper bound of the document lengths, known on the host."""
    total: int
    """Length of the packed sequence, known on the host."""
    q_runs: Runs | None = None
    """Where the queries stand, known on the host; None: they are the whole sequence."""
    k_runs: Runs | None = None
    """The same for the keys."""
    cu_seqlens_cpu: Tensor | None = None
    """`cu_seqlens` in CPU memory, for those who must know the boundaries without waiting for the GPU."""
    cache: dict[Any, object] = field(default_factory=dict, compare=False, repr=False)
    """What an attention derived from this layout alone; all layers of a model share the layout, and so this."""

    @property
    def is_whole(self) -> bool:
        """True when queries and keys are both the whole sequence."""
        return self.q_runs is None and self.k_runs is None

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """`cu_seqlens` as numbers; without `cu_seqlens_cpu`, this waits for the device."""
        return tuple((self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist())

    def part(self, q_runs: Runs | None, k_runs: Runs | None) -> "Layout":
        """The layout of these queries and keys of the same sequence: for equal runs the same object, with its cache."""
        key = ("part", q_runs, k_runs)
        if key not in self.cache:
            self.cache[key] = replace(self, q_runs=q_runs, k_runs=k_runs, cache={})
        part = self.cache[key]
        assert isinstance(part, Layout)
        return part

    @cached_property
    def q_tokens(self) -> Tensor:
        """int64 [T]: index of each query in the packed sequence."""
        return self._indices(self.q_runs)

    @cached_property
    def k_tokens(self) -> Tensor:
        """int64 [S]: index of each key in the packed sequence."""
        return self._indices(self.k_runs)

    def _indices(self, runs: Runs | None) -> Tensor:
        runs = ((0, self.total),) if runs is None else runs or ((0, 0),)
        return torch.cat([torch.arange(start, stop, device=self.cu_seqlens.device) for start, stop in runs])

    @cached_property
    def q_documents(self) -> Tensor:
        """int64 [T]: document of each query."""
        return self.documents(self.q_tokens)

    @cached_property
    def k_documents(self) -> Tensor:
        """int64 [S]: document of each key."""
        return self.documents(self.k_tokens)

    def documents(self, tokens: Tensor) -> Tensor:
        """int64, the shape of `tokens`: document of each token; empty documents own none."""
        return torch.searchsorted(self.cu_seqlens[1:].long(), tokens, right=True)

    def positions(self, tokens: Tensor, documents: Tensor) -> Tensor:
        """int64, the shape of `tokens`: position of each token inside its document."""
        return tokens - self.cu_seqlens.long()[documents]


def packed_layout(lengths: list[int], device: torch.device | str = "cpu") -> Layout:
    """The layout of whole documents of these `lengths` (tokens, >= 0), one after the other."""
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    on_device = cu_seqlens.to(device, non_blocking=True)
    return Layout(on_device, max(lengths, default=0), sum(lengths), cu_seqlens_cpu=cu_seqlens)


ATTENTIONS: "Registry[LocalAttention]" = Registry()


class LocalAttention(Protocol):
    """Causal self-attention over any subset of a packed sequence's keys. Kinds inherit from it.

    Dtypes: q, k, v, dout and all results but `lse` share one floating dtype; `lse` is the natural log-sum-exp of the
    scaled scores in float32 (float64 for float64 input), and a row without any key gives out = 0, lse = -inf.
    """

    Options: ClassVar[type[Section]]
    """The YAML options of this kind; its defaults must be usable."""

    alignment: int
    """Tokens of a unit, which `summarize` must be given whole; counted from each document's start. The last unit of a
    document may be short."""
    couples_heads: bool = False
    """Whether the query heads that share a key/value head decide together, and so must be given together."""
    work_grows: bool = True
    """Whether a query's work grows with its position, so that equal runs of a sequence are unequal work."""
    name: str = ""
    """Stands for this object in the arguments of torch operators: text, which torch.compile takes as a constant."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        attention = super().__new__(cls)
        attention.name = ATTENTIONS.add(attention, *arguments, options)
        return attention

    def __init__(self, options: Section, head_dim: int) -> None: ...

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor | None:
        """What `plan` needs to know of all keys, [units, K, ...], or None. Carries no gradient.

        One row for every unit of the packed sequence, in its order, zero for units of which no key is given: what
        holders of different units compute adds up to the whole. Key/value heads do not mix, here or below: a slice
        of them is the summary of that slice.
        """
        ...

    def plan(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Plan:
        """Choose, for each query, what it will attend to, given all summaries."""
        ...

    def describe_plan(self, plan: Plan, layout: Layout) -> dict[str, float]:
        """What the choices in a plan for the layout's queries are like, for people to read; {} without any.

        `choices` is how many there are, every other number the mean of something over them; all are finite.
        """
        return {}

    def empty_plan(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Plan:
        """Tensors of the shapes and dtypes of `plan`'s result, contents undefined: for torch.compile's tracing."""
        ...

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, plan: Plan) -> tuple[Tensor, Tensor]:
        """Attention of these queries to these keys as far as `plan` and causality allow: out [T, H, D], lse [H, T]."""
        ...

    def attend_backward(
        self,
        dout_THD: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        layout: Layout,
        plan: Plan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv) of `attend`; `out` and `lse` are those merged over all keys, not only these."""
        ...
