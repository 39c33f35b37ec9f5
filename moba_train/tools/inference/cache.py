"""Key/value cache as an attention engine, so that the model's code knows nothing of caching.

Shape suffixes: T queries of this call, R rows of the cache, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Literal, get_args

import torch
from torch import Tensor

from moba_train.attention.engine import Engine
from moba_train.attention.facets import Decodes, TakesSelection, decode_as_trained
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.kernels.common.merge import with_sink
from moba_train.attention.kernels.table import kernel_decodes
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout, TokenRange, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.shard import Generation, Shard, ShardPlace, States
from moba_train.model.build import attention_of_new_tokens

Decode = Literal["full", "own"]
"""Attention of new tokens: full attention, as in the MoBA paper, or each layer's own attention kind."""


def check_decode(decode: str) -> None:
    """Raises ValueError, naming what is allowed, when `decode` is not a `Decode`."""
    if decode not in get_args(Decode):
        raise ValueError(f"decode: {decode!r} given, allowed: {', '.join(get_args(Decode))}")


class CachePlan:
    """Allocation of the rows of every layer's cache to sequences, and the tokens of the model's next call.

    The rows of a sequence are neighbours: all of its tokens and room for those to come. A call either reads tokens of
    one prompt (`read`) or takes one new token of each running sequence (`decode`).
    """

    def __init__(self, capacities: Sequence[int], device: torch.device) -> None:
        """capacities: tokens of prompt and answer together, for each sequence."""
        edges = [0, *accumulate(capacities)]
        self.rows = edges[-1]
        self.starts = edges[:-1]
        self.lengths = [0] * len(capacities)
        self.capacities = list(capacities)
        self.device = device
        self.prompt: int | None = None
        """The sequence whose prompt this call reads; None: the call decodes."""
        self.running: tuple[int, ...] = ()
        """The sequences that this call brings tokens of, in the order of its rows."""
        self.new_rows = torch.empty(0, dtype=torch.int64)
        """Rows of the cache that take the new keys and values."""
        self.layout = packed_layout([0])
        """The running sequences up to their newest tokens; the new tokens are its queries."""
        self.unit = 128
        """Tokens in which the launches of a new token do not change: keys that a program of the decode kernel reads at
        a time, and whole units of every layer's summaries are multiples of it. 0: they may change with every token."""

    def read(self, sequence: int, tokens: int) -> None:
        """The next call brings this many tokens of the sequence's prompt."""
        first = self.lengths[sequence]
        end = self.lengths[sequence] = first + tokens
        self.prompt = sequence
        self.running = (sequence,)
        self.new_rows = torch.arange(first, end, device=self.device) + self.starts[sequence]
        self.layout = packed_layout([end], self.device)
        if first:
            self.layout = self.layout.part((TokenRange(first, end),), None)

    def decode(self, sequences: Sequence[int]) -> None:
        """The next call brings one token of each of these sequences."""
        for sequence in sequences:
            self.lengths[sequence] += 1
        self.prompt = None
        self.running = tuple(sequences)
        self.new_rows = torch.tensor([stop - 1 for _, stop in self.ranges()]).to(self.device, non_blocking=True)
        self.layout = last_tokens([self.lengths[sequence] for sequence in sequences], self.device)

    def ranges(self) -> tuple[TokenRange, ...]:
        """Rows of the running sequences up to their newest tokens."""
        return tuple(TokenRange(self.starts[s], self.starts[s] + self.lengths[s]) for s in self.running)


@dataclass
class _Stored:
    """Cached keys, values and summaries of one attention of one layer."""

    k_RKD: Tensor
    v_RKD: Tensor
    summaries: Tensor | None
    """Summaries of every sequence's units, in rows of their own; zeros for units that are not complete."""
    complete: list[int]
    """Units of each sequence that are summarized."""


class CachedAttention(Engine):
    """Engine of one layer while sequences are generated; holds the keys and values of all their tokens so far.

    Prompts are read with the layer's own attention, in parts of any size. New tokens attend to the cache with full
    attention, where it may replace the layer's own, or with that. An attention's summaries (MoBA: the mean key of a
    block) are computed once, when their unit is complete.
    """

    def __init__(self, plan: CachePlan, decode: Decode, kind: AttentionKind) -> None:
        """plan: shared by all layers; decode: attention of new tokens; kind: the layer's."""
        self._plan = plan
        self._decode = decode
        self._full = attention_of_new_tokens(kind) if decode == "full" else None
        self._stored: dict[LocalAttention, _Stored] = {}
        self._gathered: dict[str, Tensor] = {}
        self._states = _RunningStates(plan)

    def __call__(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append the new keys and values, and attend from the new queries. Returns out [T, H, D] and lse [H, T]."""
        return with_sink(*self._attend(q_THD, k_TKD, v_TKD, attention), *sink)

    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention) -> tuple[Tensor, Tensor]:
        plan = self._plan
        stored = self._append(k_TKD, v_TKD, attention)
        cached = CachedKeys(stored.k_RKD, stored.v_RKD, plan.ranges(), plan.layout, None)
        if plan.prompt is None:
            attention = self._full or attention
            plan.unit = _repeated(attention, q_THD, plan.unit)
        if plan.prompt is not None or self._full is None:
            self._summarize(stored, attention)
            cached = replace(cached, summaries=self._packed_summaries(stored, attention))
        if plan.prompt is None and isinstance(attention, Decodes):
            return attention.decode(q_THD, cached)
        return decode_as_trained(attention, q_THD, cached)

    def shard(self, layout: Layout) -> Shard:
        """The new tokens, what the layer has gathered of all tokens so far, and its states."""
        self._plan.unit = 0
        attends_to_all = self._plan.prompt is None and self._decode == "full"
        return CachedShard(self._plan, Generation(attends_to_all, self._states), self._gathered)

    def _append(self, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention) -> _Stored:
        stored = self._stored.get(attention)
        if stored is None:
            stored = self._stored[attention] = self._empty(k_TKD, v_TKD, attention)
        stored.k_RKD[self._plan.new_rows] = k_TKD
        stored.v_RKD[self._plan.new_rows] = v_TKD
        return stored

    def _empty(self, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention) -> _Stored:
        plan = self._plan
        one = attention.summarize(k_TKD[:1], packed_layout([1], plan.device))  # for its shape
        summaries = None
        if one is not None:
            summaries = one.new_zeros((self._unit_edges(attention.facts.alignment)[-1], *one.shape[1:]))
        shape = (plan.rows, *k_TKD.shape[1:])
        return _Stored(k_TKD.new_empty(shape), v_TKD.new_empty(shape), summaries, [0] * len(plan.lengths))

    def _summarize(self, stored: _Stored, attention: LocalAttention) -> None:
        """Summarize the units that the new tokens have completed."""
        if stored.summaries is None:
            return
        alignment = attention.facts.alignment
        edges = self._unit_edges(alignment)
        for sequence, (start, stop) in zip(self._plan.running, self._plan.ranges(), strict=True):
            done = stored.complete[sequence]
            complete = (stop - start) // alignment
            if complete == done:
                continue
            tokens = (complete - done) * alignment
            k_TKD = stored.k_RKD[start + done * alignment :][:tokens]
            new = attention.summarize(k_TKD, packed_layout([tokens], self._plan.device))
            assert new is not None
            # Cut: `summarize` returns a row for each id up to a bound, more than there are units.
            stored.summaries[edges[sequence] + done : edges[sequence] + complete] = new[: complete - done]
            stored.complete[sequence] = complete

    def _packed_summaries(self, stored: _Stored, attention: LocalAttention) -> Tensor | None:
        """The summaries of the running sequences as the plan's layout orders them: a view where there is one.

        As many rows as `block_bound` counts, zeros behind the last unit.
        """
        if stored.summaries is None:
            return None
        alignment = attention.facts.alignment
        edges = self._unit_edges(alignment)
        lengths = [self._plan.lengths[sequence] for sequence in self._plan.running]
        if len(lengths) == 1:
            return stored.summaries[edges[self._plan.running[0]] :][: lengths[0] // alignment + 1]
        units = [-(-length // alignment) for length in lengths]
        parts = [
            stored.summaries[edges[sequence] :][:count]
            for sequence, count in zip(self._plan.running, units, strict=True)
        ]
        unused = sum(lengths) // alignment + len(lengths) - sum(units)
        return torch.cat([*parts, stored.summaries.new_zeros((unused, *stored.summaries.shape[1:]))])

    def _unit_edges(self, alignment: int) -> list[int]:
        """Offsets of each sequence's units among the rows of summaries, with the end of the last ones.

        Each sequence has a row more than it needs, which stays zero.
        """
        return [0, *accumulate(capacity // alignment + 2 for capacity in self._plan.capacities)]


class CachedShard(Shard):
    """The new tokens of the running sequences: what is gathered are the rows of all their tokens so far.

    Nothing is differentiable.
    """

    def __init__(self, plan: CachePlan, generation: Generation, gathered: dict[str, Tensor]) -> None:
        """gathered: rows of the layer's cache by name; extended here."""
        self.generation = generation
        self._plan = plan
        self._gathered = gathered

    @property
    def layout(self) -> Layout:
        """The running sequences, with the new tokens as queries."""
        return self._plan.layout

    @property
    def place(self) -> ShardPlace:
        """The new tokens, in the packed sequence of all tokens so far."""
        return ShardPlace(0, (self.layout.query_ranges,))

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all tokens so far: `x_nx` is kept after those of earlier calls."""
        if name not in self._gathered:
            self._gathered[name] = x_nx.new_empty((self._plan.rows, *x_nx.shape[1:]))
        rows_Rx = self._gathered[name]
        rows_Rx[self._plan.new_rows] = x_nx
        parts = [rows_Rx[start:stop] for start, stop in self._plan.ranges()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) of the new tokens over all tokens so far."""
        layout = self.layout
        if selected_HnC is not None:
            assert isinstance(attention, TakesSelection)
            selection = attention.given_selection(selected_HnC, q_nHD, k_TKD, layout)
        else:
            selection = attention.select(q_nHD, attention.summarize(k_TKD, layout.part(None, None)), layout)
        return attention.attend(q_nHD, k_TKD, v_TKD, layout, selection)


class _RunningStates(States):
    """States of the running sequences by name; those of the other sequences are kept."""

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self._of_all: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        return self._of_all[name][self._running()] if name in self._of_all else None

    def __setitem__(self, name: str, states_Bx: Tensor) -> None:
        if name not in self._of_all:
            self._of_all[name] = states_Bx.new_zeros((len(self._plan.lengths), *states_Bx.shape[1:]))
        self._of_all[name][self._running()] = states_Bx

    def _running(self) -> Tensor:
        running = self._plan.running
        return self._plan.layout.cached(
            "running", lambda: torch.tensor(running).to(self._plan.device, non_blocking=True)
        )


def _repeated(attention: LocalAttention, q_BHD: Tensor, unit: int) -> int:
    """`CachePlan.unit` with this attention: only the decode kernel finds a sequence's length on the device."""
    if type(attention) is FullAttention:
        return unit if attention.options.backend == "auto" and kernel_decodes(q_BHD) else 0
    if type(attention) is not MobaAttention or attention.backend not in ("auto", "triton"):
        return 0
    return gcd(unit, attention.block_size) if unit and kernel_decodes(q_BHD, attention.block_size) else 0
