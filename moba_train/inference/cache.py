"""Key/value cache as an attention engine, so that the model's code knows nothing of caching.

Shape suffixes: T queries of this call, R rows of the cache, H query heads, K key/value heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from moba_train.attention.decoding import CachedKeys, last_tokens
from moba_train.attention.full import FullAttention
from moba_train.attention.previous import shifted
from moba_train.attention.protocol import Layout, LocalAttention, TokenRange, TokenRanges, packed_layout

Decode = Literal["full", "own"]
"""Attention of new tokens: full attention, as in the MoBA paper, or each layer's own attention kind."""


def check_decode(decode: str) -> None:
    """Raises ValueError, naming what is allowed, when `decode` is not a `Decode`."""
    if decode == "moba":
        raise ValueError("decode: 'moba' is called 'own' now")
    if decode not in get_args(Decode):
        raise ValueError(f"decode: {decode!r} given, allowed: {', '.join(get_args(Decode))}")


class CachePlan:
    """Which rows of every layer's cache each sequence has, and what the next call of the model brings.

    The rows of a sequence are neighbours: all of its tokens and room for those to come. A call either reads tokens of
    one prompt (`read`) or brings one new token of each running sequence (`decode`).
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
    """What one layer holds for one of its attentions."""

    k_RKD: Tensor
    v_RKD: Tensor
    summaries: Tensor | None
    """Summaries of every sequence's units, in rows of their own; zeros for units that are not complete."""
    complete: list[int]
    """Units of each sequence that are summarized."""


class CachedAttention:
    """Engine of one layer while sequences are generated; holds the keys and values of all their tokens so far.

    Prompts are read with the layer's own attention, in parts of any size. New tokens attend to the cache with full
    attention, where it may replace the layer's own, or with that. An attention's summaries (MoBA: the mean key of a
    block) are computed once, when their unit is complete.
    """

    def __init__(self, plan: CachePlan, decode: Decode) -> None:
        """plan: shared by all layers; decode: attention of new tokens."""
        self._plan = plan
        self._decode = decode
        self._stored: dict[str, _Stored] = {}
        self._gathered: dict[str, Tensor] = {}
        self._states: dict[str, Tensor] = {}

    def __call__(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Append the new keys and values, and attend from the new queries. Returns out [T, H, D] and lse [H, T]."""
        plan = self._plan
        stored = self._append(k_TKD, v_TKD, attention)
        cached = CachedKeys(stored.k_RKD, stored.v_RKD, plan.ranges(), plan.layout, None)
        if plan.prompt is None and self._decode == "full" and attention.decodes_full:
            return _full_attention(q_THD.shape[-1]).decode(q_THD, cached)
        self._summarize(stored, attention)
        cached = replace(cached, summaries=self._packed_summaries(stored, attention))
        if plan.prompt is None:
            return attention.decode(q_THD, cached)
        selection = attention.select(q_THD, cached.summaries, plan.layout)
        return attention.attend(q_THD, cached.packed_keys(), cached.packed_values(), plan.layout, selection)

    def shard(self, layout: Layout) -> "CachedShard":
        """The new tokens, what the layer has gathered of all tokens so far, and its states."""
        return CachedShard(self._plan, self._decode, self._gathered, self._states)

    def _append(self, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention) -> _Stored:
        stored = self._stored.get(attention.handle)
        if stored is None:
            stored = self._stored[attention.handle] = self._empty(k_TKD, v_TKD, attention)
        stored.k_RKD[self._plan.new_rows] = k_TKD
        stored.v_RKD[self._plan.new_rows] = v_TKD
        return stored

    def _empty(self, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention) -> _Stored:
        plan = self._plan
        one = attention.summarize(k_TKD[:1], packed_layout([1], plan.device))  # for its shape
        summaries = None
        if one is not None:
            summaries = one.new_zeros((self._unit_edges(attention.alignment)[-1], *one.shape[1:]))
        shape = (plan.rows, *k_TKD.shape[1:])
        return _Stored(k_TKD.new_empty(shape), v_TKD.new_empty(shape), summaries, [0] * len(plan.lengths))

    def _summarize(self, stored: _Stored, attention: LocalAttention) -> None:
        """Summarize the units that the new tokens have completed."""
        if stored.summaries is None:
            return
        alignment = attention.alignment
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
            stored.summaries[edges[sequence] + done : edges[sequence] + complete] = new[: complete - done]
            stored.complete[sequence] = complete

    def _packed_summaries(self, stored: _Stored, attention: LocalAttention) -> Tensor | None:
        """The summaries of the running sequences as the plan's layout orders them: a view where there is one.

        As many rows as `block_bound` counts, zeros behind the last unit.
        """
        if stored.summaries is None:
            return None
        alignment = attention.alignment
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
        """Where the units of each sequence begin among the rows of summaries, and where the last ones end.

        Each sequence has a row more than it needs, which stays zero.
        """
        return [0, *accumulate(capacity // alignment + 2 for capacity in self._plan.capacities)]


class CachedShard:
    """The new tokens of the running sequences as a `Shard`: what is gathered are the rows of all their tokens so far.

    Nothing is differentiable.
    """

    observer = None
    ranks = 1
    rank = 0
    generates = True

    def __init__(self, plan: CachePlan, decode: Decode, gathered: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        """gathered: rows of the layer's cache by name; states: those of all sequences by name; both extended here."""
        self.layout = plan.layout
        self.attends_to_all = plan.prompt is None and decode == "full"
        self._plan = plan
        self._gathered = gathered
        self._states = states

    @property
    def ranges_by_rank(self) -> tuple[TokenRanges, ...]:
        """The new tokens, in the packed sequence of all tokens so far."""
        ranges = self.layout.q_ranges
        return ((TokenRange(0, self.layout.total),) if ranges is None else ranges,)

    def own(self, x_Lx: Tensor) -> Tensor:
        """All rows: there is no padding."""
        return x_Lx

    def padded(self, x_nx: Tensor) -> Tensor:
        """All rows."""
        return x_nx

    def gather(self, name: str, x_nx: Tensor) -> Tensor:
        """The rows of all tokens so far: `x_nx` is kept after those of earlier calls."""
        if name not in self._gathered:
            self._gathered[name] = x_nx.new_empty((self._plan.rows, *x_nx.shape[1:]))
        rows_Rx = self._gathered[name]
        rows_Rx[self._plan.new_rows] = x_nx
        parts = [rows_Rx[start:stop] for start, stop in self._plan.ranges()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def previous(self, name: str, x_nx: Tensor, count: int) -> list[Tensor]:
        """Rows of the tokens 1, 2, ... `count` before each; of every sequence, the last `count` are kept."""
        if name not in self._gathered:
            self._gathered[name] = x_nx.new_zeros((len(self._plan.capacities), count, *x_nx.shape[1:]))
        last = self._gathered[name]
        if self._plan.prompt is not None:
            rows_x = torch.cat([last[self._plan.prompt], x_nx])
            last[self._plan.prompt] = rows_x[len(x_nx) :]
            return shifted(rows_x, count)
        running = list(self._plan.running)
        rows_Bcx = torch.cat([last[running], x_nx.unsqueeze(1)], dim=1)
        last[running] = rows_Bcx[:, 1:]
        return [rows_Bcx[:, count - distance] for distance in range(1, count + 1)]

    def all_ranks(self, x: Tensor) -> Tensor:
        """`x` [R, ...] of the one rank there is."""
        return x.unsqueeze(0)

    def states(self, name: str) -> Tensor | None:
        """The states of the running sequences, zeros for those that have none yet; None where no sequence has any."""
        return self._states[name][self._running()] if name in self._states else None

    def keep_states(self, name: str, states_Bx: Tensor) -> None:
        """Keep the states of the running sequences in place of those before."""
        if name not in self._states:
            self._states[name] = states_Bx.new_zeros((len(self._plan.lengths), *states_Bx.shape[1:]))
        self._states[name][self._running()] = states_Bx

    def _running(self) -> Tensor:
        running = self._plan.running
        return self.layout.cached("running", lambda: torch.tensor(running).to(self._plan.device, non_blocking=True))

    def attend(
        self, q_nHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, selected_HnC: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(out [n, H, D], lse [H, n]) of the new tokens over all tokens so far."""
        layout = self.layout
        if selected_HnC is not None:
            selection = attention.given_selection(selected_HnC, q_nHD, k_TKD, layout)
        else:
            selection = attention.select(q_nHD, attention.summarize(k_TKD, layout.part(None, None)), layout)
        return attention.attend(q_nHD, k_TKD, v_TKD, layout, selection)


@cache
def _full_attention(head_dim: int) -> FullAttention:
    return FullAttention(FullAttention.Options(), head_dim)
