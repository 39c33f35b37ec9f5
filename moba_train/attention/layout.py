"""Layout of queries and keys in one packed sequence: positions, documents and token ranges.

Shape suffixes: T queries, S keys.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from moba_train.torch_private import tensor_version

T = TypeVar("T")
P = ParamSpec("P")


class TokenRange(NamedTuple):
    """Tokens [start, stop), by their indices in the packed sequence."""

    start: int
    stop: int


TokenRanges = tuple[TokenRange, ...]
"""Ascending and disjoint: the tokens of a shard."""


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> TokenRanges:
    """Ascending ranges that hold the tokens of `ranges`: adjacent ones are joined, empty ones dropped."""
    return join_ascending(sorted(ranges))


def join_ascending(ranges: Iterable[tuple[int, int]]) -> TokenRanges:
    """`joined_ranges` of ascending ranges. Takes sizes that torch.compile traces as symbols, which it cannot sort."""
    joined: list[TokenRange] = []
    for start, stop in ranges:
        if joined and joined[-1].stop == start:
            joined[-1] = TokenRange(joined[-1].start, stop)
        elif start != stop:
            joined.append(TokenRange(start, stop))
    return tuple(joined)


@dataclass(frozen=True)
class Layout:
    """The place of the given queries and keys in one packed sequence.

    Positions, documents and blocks all follow from a token's index in the packed sequence and from the document
    boundaries, so no code derives them from the number of a local row.
    """

    cu_seqlens: Tensor
    """int32 [docs + 1]: document boundaries in the packed sequence; first 0, last its length.

    Must not be edited while the layout is in use: what is derived from it is kept."""
    max_seqlen: int
    """An upper bound of the document lengths, known on the host."""
    total: int
    """Length of the packed sequence, known on the host."""
    q_ranges: TokenRanges | None = None
    """Tokens of the queries, known on the host; None: the whole sequence."""
    k_ranges: TokenRanges | None = None
    """Tokens of the keys, known on the host; None: the whole sequence."""
    cu_seqlens_cpu: Tensor | None = None
    """`cu_seqlens` in CPU memory, for readers that must not wait for the GPU."""
    _cache: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_whole(self) -> bool:
        """True if queries and keys are both the whole sequence."""
        return self.q_ranges is None and self.k_ranges is None

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """`cu_seqlens` as numbers; without `cu_seqlens_cpu`, this waits for the device."""
        return tuple((self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist())

    @property
    def query_ranges(self) -> TokenRanges:
        """`q_ranges`, of the whole sequence as one range."""
        return (TokenRange(0, self.total),) if self.q_ranges is None else self.q_ranges

    @property
    def key_ranges(self) -> TokenRanges:
        """`k_ranges`, of the whole sequence as one range."""
        return (TokenRange(0, self.total),) if self.k_ranges is None else self.k_ranges

    @property
    def queries(self) -> int:
        """Number of queries, T, known on the host."""
        return sum(stop - start for start, stop in self.query_ranges)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` at the first call with this key, its result at later ones: for what follows from the layout and the
        key alone. All layers of a model share the layout, and so the result."""
        if key not in self._cache:
            self._cache[key] = make()
        return cast(T, self._cache[key])

    def part(self, q_ranges: TokenRanges | None, k_ranges: TokenRanges | None) -> "Layout":
        """The layout of these queries and keys of the sequence; equal ranges give one object, with its cache."""
        key = "part", q_ranges, k_ranges
        return self.cached(key, lambda: replace(self, q_ranges=q_ranges, k_ranges=k_ranges, _cache={}))

    @cached_property
    def q_tokens(self) -> Tensor:
        """int64 [T]: index of each query in the packed sequence."""
        return self._indices(self.query_ranges)

    @cached_property
    def k_tokens(self) -> Tensor:
        """int64 [S]: index of each key in the packed sequence."""
        return self._indices(self.key_ranges)

    def _indices(self, ranges: TokenRanges) -> Tensor:
        return torch.cat([torch.arange(*tokens, device=self.cu_seqlens.device) for tokens in ranges or ((0, 0),)])

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


def kept(derive: Callable[P, T]) -> Callable[P, T]:
    """A function of a layout and hashable values, or a hashable object's method, whose result is kept with the layout
    (`Layout.cached`)."""

    @wraps(derive)
    def once(*values: P.args, **named: P.kwargs) -> T:
        at = 0 if isinstance(values[0], Layout) else 1  # behind a method's object
        layout = cast(Layout, values[at])
        key = (derive, *values[:at], *values[at + 1 :], *named.items())
        if key not in layout._cache:
            layout._cache[key] = derive(*values, **named)
        return cast(T, layout._cache[key])

    return once


def packed_layout(lengths: list[int], device: torch.device | str = "cpu") -> Layout:
    """The layout of whole documents of these `lengths` (tokens, >= 0), one after the other."""
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    on_device = cu_seqlens.to(device, non_blocking=True)
    return Layout(on_device, max(lengths, default=0), sum(lengths), cu_seqlens_cpu=cu_seqlens)


LayoutArguments = tuple[Tensor, Tensor | None, int, int, list[int]]
"""A layout as torch operators take it: cu_seqlens, cu_seqlens_cpu, max_seqlen, total, and the token ranges of the
queries: start, stop, start, stop, ..."""

_last_layout: tuple[Layout, int] | None = None


def whole_layout(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int) -> Layout:
    """The layout of these tensors; the previous one again, with its cache, while they are unchanged.

    The layers of a model pass the same tensors, so what an attention derives from a layout is derived once a step.
    """
    global _last_layout
    if cu_seqlens.is_inference():  # has no version to tell an edit by
        return Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    if _last_layout is not None:
        last, version = _last_layout
        same = last.cu_seqlens is cu_seqlens and version == tensor_version(cu_seqlens)
        same = same and last.cu_seqlens_cpu is cu_seqlens_cpu
        if same and (last.max_seqlen, last.total) == (max_seqlen, total):
            return last
    layout = Layout(cu_seqlens, max_seqlen, total, cu_seqlens_cpu=cu_seqlens_cpu)
    _last_layout = layout, tensor_version(cu_seqlens)
    return layout


def layout_arguments(layout: Layout) -> LayoutArguments:
    """A shard's layout as arguments of an operator."""
    numbers = [token for token_range in layout.query_ranges for token in token_range]
    return layout.cu_seqlens, layout.cu_seqlens_cpu, layout.max_seqlen, layout.total, numbers


def argument_layout(
    cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, max_seqlen: int, total: int, q_ranges: Sequence[int]
) -> Layout:
    """The inverse of `layout_arguments`: one object, with its cache, for all layers of a step."""
    layout = whole_layout(cu_seqlens, cu_seqlens_cpu, max_seqlen, total)
    ranges = paired(q_ranges)
    return layout if ranges == (TokenRange(0, total),) else layout.part(ranges, None)


def paired(q_ranges: Sequence[int]) -> TokenRanges:
    """Ranges from start, stop, start, stop, ..."""
    return tuple(TokenRange(*pair) for pair in zip(q_ranges[::2], q_ranges[1::2], strict=True))
