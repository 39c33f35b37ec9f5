"""The contract between attention and context parallelism.

An attention knows nothing of ranks; context parallelism knows nothing of blocks. They meet in four functions, called in
order: `summarize` each shard of keys, `select` from all summaries, `attend` to any subsets of the keys (merging the
partial results by online softmax, see merge.py), and `attend_backward` with the merged results.

Shape suffixes: T queries, S keys, H query heads, K key/value heads, D head width.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor

from moba_train.attention.statistics import Statistics
from moba_train.config.base import Section

if TYPE_CHECKING:
    from moba_train.attention.by_unit import UnitAttention
    from moba_train.attention.decoding import CachedKeys

T = TypeVar("T")

Selection = tuple[Tensor, ...]
"""Result of `select`, opaque to its callers; saved for the backward pass and for recomputation."""


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
        if start == stop:
            continue
        if joined and joined[-1].stop == start:
            joined[-1] = TokenRange(joined[-1].start, stop)
        else:
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
        """Whether queries and keys are both the whole sequence."""
        return self.q_ranges is None and self.k_ranges is None

    @cached_property
    def edges(self) -> tuple[int, ...]:
        """`cu_seqlens` as numbers; without `cu_seqlens_cpu`, this waits for the device."""
        return tuple((self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu).tolist())

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """`make()` at the first call with this key, its result at later ones.

        For what follows from the layout and the key alone. All layers of a model share the layout, and so the result.
        """
        if key not in self._cache:
            self._cache[key] = make()
        return cast(T, self._cache[key])

    def part(self, q_ranges: TokenRanges | None, k_ranges: TokenRanges | None) -> "Layout":
        """The layout of these queries and keys of the sequence; equal ranges give one object, with its cache."""
        return self.cached(
            ("part", q_ranges, k_ranges), lambda: replace(self, q_ranges=q_ranges, k_ranges=k_ranges, _cache={})
        )

    @cached_property
    def q_tokens(self) -> Tensor:
        """int64 [T]: index of each query in the packed sequence."""
        return self._indices(self.q_ranges)

    @cached_property
    def k_tokens(self) -> Tensor:
        """int64 [S]: index of each key in the packed sequence."""
        return self._indices(self.k_ranges)

    def _indices(self, ranges: TokenRanges | None) -> Tensor:
        some = ((0, self.total),) if ranges is None else ranges or ((0, 0),)
        return torch.cat([torch.arange(start, stop, device=self.cu_seqlens.device) for start, stop in some])

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


class BackwardState(NamedTuple):
    """The tensors of a backward pass: the upstream gradient, the inputs, and the merged results.

    Around a ring, and for a part of the keys in general, `out` and `lse` come from more keys than `k` and `v` hold.
    """

    dout: Tensor
    """[T, H, D]: gradient of `out`."""
    q: Tensor
    """[T, H, D]"""
    k: Tensor
    """[S, K, D]"""
    v: Tensor
    """[S, K, D]"""
    out: Tensor
    """[T, H, D]: merged over all keys."""
    lse: Tensor
    """[H, T], float32 or float64: merged over all keys."""

    def with_queries(self, rows: slice) -> "BackwardState":
        """These rows of the queries and of their results, all keys; `lse` becomes contiguous."""
        return self._replace(
            dout=self.dout[rows], q=self.q[rows], out=self.out[rows], lse=self.lse[:, rows].contiguous()
        )

    def with_keys(self, k: Tensor, v: Tensor) -> "BackwardState":
        """The queries against other keys and values."""
        return self._replace(k=k, v=v)

    def with_heads(self, heads: slice, kv_heads: slice) -> "BackwardState":
        """Some query heads and the key/value heads that they share, as views."""
        return BackwardState(
            self.dout[:, heads],
            self.q[:, heads],
            self.k[:, kv_heads],
            self.v[:, kv_heads],
            self.out[:, heads],
            self.lse[heads],
        )


Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv), shapes and dtypes of q, k and v."""


class OperatorHandles(Generic[T]):
    """Living objects by handle: the text that names an object in the arguments of a torch operator.

    The arguments of a custom operator are tensors, numbers and text; torch.compile takes text as a constant. Compiled
    code outlives the process in a cache on disk, together with the shapes of the operators' results, and is found again
    by its constants: so a handle says all that those shapes may depend on, or a run with other options would be given
    that code. No object is kept alive.
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, member: T, *settings: object) -> str:
        """A new handle for `member`, which was constructed from these settings."""
        handle = f"{type(member).__name__} {next(self._numbers)}: {', '.join(map(repr, settings))}"
        self._objects[handle] = member
        return handle

    def __getitem__(self, handle: str) -> T:
        return self._objects[handle]


def constructed(cls: type[T], arguments: tuple[Any, ...], options: dict[str, Any]) -> T:
    """A `cls` of these settings."""
    return cls(*arguments, **options)


ATTENTIONS: "OperatorHandles[LocalAttention]" = OperatorHandles()


class LocalAttention(Protocol):
    """Causal self-attention over any subset of a packed sequence's keys. Kinds inherit from it.

    Dtypes: q, k, v, dout and all results but `lse` share one floating dtype; `lse` is the natural log-sum-exp of the
    scaled scores in float32 (float64 for float64 input), and a row without any key gives out = 0, lse = -inf.
    """

    Options: ClassVar[type[Section]] = Section
    """The YAML options of a kind that is this attention, with usable defaults; none for a part of a kind."""

    alignment: int
    """Tokens of a unit, counted from each document's start. `summarize` must be given whole units; the last unit of a
    document may be short."""
    couples_heads: bool = False
    """Whether the query heads that share a key/value head select together, and so must be given together."""
    work_grows: bool = True
    """Whether a query's work grows with its position, so that equal ranges of a sequence are unequal work."""
    merges: bool = True
    """Whether results over disjoint keys merge by online softmax into the result over all. Where they do not, `attend`
    must be given all keys at once, and `attend_backward` ignores the state's `out` and `lse`."""
    decodes_full: bool = True
    """Whether `decode: full` may replace this attention by full attention for new tokens: it is full attention once it
    selects everything."""
    scale: float
    """Factor on the scores."""

    @property
    def block_size(self) -> int:
        """Tokens of the blocks that `selected_blocks` and `block_scores` count."""
        return self.alignment

    handle: str = ""
    """Names this object in the arguments of torch operators (operators.py)."""
    _settings: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @property
    def by_unit(self) -> "UnitAttention | None":
        """This attention, one unit at a time; None: queries cannot be sent to the owners of keys."""
        return None

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        attention = super().__new__(cls)
        attention.handle = ATTENTIONS.add(attention, *arguments, options)
        attention._settings = arguments, options
        return attention

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is constructed anew: it needs a handle of its own."""
        return constructed, (type(self), *self._settings)

    def __init__(self, options: Section, head_dim: int) -> None: ...

    def summarize(self, k_SKD: Tensor, layout: Layout) -> Tensor | None:
        """Summary of the keys for `select`, [units, K, ...], or None. Carries no gradient.

        One row for every unit of the packed sequence, in its order, zero for units of which no key is given: the sum of
        what holders of different units compute is the summary of the sequence. Key/value heads do not mix, here or
        below: a slice of them is the summary of that slice.
        """
        ...

    def select(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Selection:
        """Decide, for each query, what it attends to, given all summaries."""
        ...

    def given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """The selection of history blocks that the caller selected, int32 [H, T, C] as `selected_blocks` gives them.

        For attentions that do not select by themselves (blocks/given.py).
        """
        raise TypeError(f"{type(self).__name__} selects by itself: no blocks can be given")

    def empty_given_selection(self, selected_HTC: Tensor, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `given_selection`'s result, contents undefined."""
        raise TypeError(f"{type(self).__name__} selects by itself: no blocks can be given")

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """What a selection tells about the layout's queries (`statistics.SELECTION`); nothing by default, for attention
        to everything."""
        return Statistics()

    def select_blocks(self, q_THD: Tensor, summaries: Tensor | None, layout: Layout) -> Tensor | None:
        """`selected_blocks` of `select`, without what else a selection holds for attending."""
        return self.selected_blocks(self.select(q_THD, summaries, layout))

    def selected_blocks(self, selection: Selection) -> Tensor | None:
        """The history blocks, of `block_size` tokens, that each query attends to besides its own: int32 [H, T, C], ids
        as in blocks/geometry.py, ascending, -1 behind. None: every query attends to its complete history."""
        return None

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> Tensor | None:
        """`selected_blocks` of some of the layout's queries: int32 [H, n, C], or [1, n, C] for all heads alike."""
        selected_HTC = self.selected_blocks(selection)
        return None if selected_HTC is None else selected_HTC[:, rows_n]

    def block_scores(self, q_THD: Tensor, summaries: Tensor) -> Tensor | None:
        """The score of each block by which a query selects, in the units of attention's scaled scores: [H, T, N], or
        [K, T, N] where query heads that share a key/value head select together. None: blocks have no score."""
        return None

    def empty_selection(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> Selection:
        """Tensors of the shapes and dtypes of `select`'s result, contents undefined: for torch.compile's tracing."""
        ...

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) of these queries over these keys, as far as `selection` and causality allow."""
        ...

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """Gradients (dq, dk, dv) of `attend`; the state's `out` and `lse` are merged over all keys, not only these."""
        ...

    def decode(self, q_BHD: Tensor, cached: "CachedKeys") -> tuple[Tensor, Tensor]:
        """(out [B, H, D], lse [H, B]) of the newest token of each cached sequence, over the sequence's keys.

        Equal to the last row of attention to the complete sequence. The default selects and attends as training does,
        on a packed copy of the caches where there are several sequences.
        """
        selection = self.select(q_BHD, cached.summaries, cached.layout)
        return self.attend(q_BHD, cached.packed_keys(), cached.packed_values(), cached.layout, selection)
