"""Attention over a sharded sequence compared with one device: inputs, the reference, and ranks that are threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import Observer, observed
from moba_train.attention.protocol import BackwardState, LocalAttention, Selection
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.helpers import labelled
from tests.thread_ranks import thread_transports

NAMES = ("out", "lse", "dq", "dk", "dv")
HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """The documents, heads and attention of a test."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    block_size: int = 4
    topk: int | None = 3
    """None: dense attention."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    dtype: torch.dtype = torch.float64
    backend: str = "reference"
    head_dim: int = HEAD_DIM

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def attention(self) -> LocalAttention:
        if self.topk is None:
            return FullAttention(FullAttention.Options(), self.head_dim)
        options = {"block_size": self.block_size, "topk": self.topk, "backend": self.backend, **self.options}
        return MobaAttention(MobaAttention.Options(**options), self.head_dim)

    def layout(self, device: torch.device | str = "cpu") -> Layout:
        return packed_layout(list(self.lengths), device)

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> list[Tensor]:
        """q, k, v, dout of the whole sequence."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(self.total, heads, self.head_dim, dtype=torch.float64, generator=generator).to(
                device, self.dtype
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]


@dataclass
class Result:
    """The results for the whole sequence or for one rank's shard."""

    tensors: list[Tensor]
    """out [T, H, D], lse as [T, H], dq, dk, dv."""
    selected: Tensor | None
    """int32 [T, H, C]: the selected blocks."""


def on_one_device(case: Case, inputs: list[Tensor], *observers: Observer) -> Result:
    attention, layout = observed(case.attention(), observers), case.layout(inputs[0].device)
    q, k, v, dout = inputs
    selection = attention.select(q, attention.summarize(k, layout), layout)
    out, lse = attention.attend(q, k, v, layout, selection)
    grads = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)
    return Result([out, lse.T, *grads], selection[0].transpose(0, 1) if selection else None)


def for_the_same_selection(case: Case, selected_THC: Tensor | None, inputs: list[Tensor]) -> list[Tensor]:
    """The tensors of a result in float64, for a selection that was made in another dtype; None: dense attention."""
    exact = replace(case, dtype=torch.float64, backend="reference", topk=None if selected_THC is None else case.topk)
    attention, layout = exact.attention(), case.layout(inputs[0].device)
    selection = () if selected_THC is None else (selected_THC.transpose(0, 1),)
    q, k, v, dout = (x.double() for x in inputs)
    out, lse = attention.attend(q, k, v, layout, selection)
    return [out, lse.T, *attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)]


def on_a_rank(engine: ContextParallel, case: Case, inputs: list[Tensor]) -> tuple[Result, Selection]:
    """This rank's part, its rows without padding, after checking what padding must be; `selected` is left out."""
    sequence, rank = engine.sequence(case.total), engine.transport.rank
    attention, layout = case.attention(), case.layout(inputs[0].device)
    q, k, v, dout = (sequence.shard(x, rank, padding=float("nan")) for x in inputs)
    seen = observed(attention, engine.observers)
    out, lse, selection = engine.forward(q, k, v, seen, layout)
    grads = engine.backward(BackwardState(dout, q, k, v, out, lse), selection, seen, layout)
    tokens = sequence.tokens(rank)
    for name, tensor in zip(NAMES, (out, lse.T, *grads), strict=True):
        padding = tensor[tokens:]
        wanted = torch.full_like(padding, -torch.inf if name == "lse" else 0)
        assert torch.equal(padding, wanted), f"{name}: padding holds {padding}"
    return Result([x[:tokens] for x in (out, lse.T, *grads)], None), selection


def selected_by_ranks(selections: list[Selection], strategy: CPStrategy, sequence: SequenceLayout) -> Tensor:
    """The selected blocks of the whole sequence [T, H, C], from the opaque selections of all ranks."""
    # One tensor for each slice of the heads, next to the block lists of the kernels and the weights of units.
    selected_HTC = [
        torch.cat([x for x in selection if x.dim() == 3 and not x.is_floating_point()]) for selection in selections
    ]
    group = {"ulysses": strategy.ranks, "hierarchical": strategy.node_size}.get(strategy.transport, 1)
    by_group = [selected_HTC[first : first + group] for first in range(0, strategy.ranks, group)]
    joined = sequence.merge_ranks(group)
    shards = [torch.cat(group).transpose(0, 1) for group in by_group]
    return joined.to_packed(padded_shards(shards, joined.rows))


def padded_shards(shards: list[Tensor], rows: int) -> Tensor:
    """The concatenation of all ranks' shards, each padded to `rows` rows."""
    return torch.cat([torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])]) for x in shards])


def assert_same(got: list[Tensor], want: list[Tensor], atol: float = 1e-12) -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0, msg=labelled(name))


def on_threads(strategy: CPStrategy, case: Case, inputs: list[Tensor], *observers: Observer) -> Result:
    """The result of all ranks put together."""
    transports, boards = thread_transports(strategy)
    engines = [ContextParallel(strategy, transport) for transport in transports]
    for engine in engines:
        engine.observers = observers

    def run(engine: ContextParallel) -> tuple[Result, Selection]:
        try:
            return on_a_rank(engine, case, inputs)
        except BaseException:
            for board in boards:
                board.barrier.abort()
            raise

    with ThreadPoolExecutor(strategy.ranks) as pool:
        futures = [pool.submit(run, engine) for engine in engines]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    results, selections = zip(*(future.result() for future in futures), strict=True)
    sequence = engines[0].sequence(case.total)
    shards = [
        padded_shards(list(tensors), sequence.rows)
        for tensors in zip(*(result.tensors for result in results), strict=True)
    ]
    selected = selected_by_ranks(list(selections), strategy, sequence) if selections[0] else None
    return Result([sequence.to_packed(x) for x in shards], selected)
