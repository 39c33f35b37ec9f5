"""Which transport and layout to use: what is possible, what it costs, and the choice of `auto`.

Costs are predictions for one layer, forward and backward together: bytes that a rank receives, over the links of its
node and between nodes, and bytes that it copies and sums in its own memory for that; the seconds they take at measured
rates; and the memory of the buffers. Against transfers measured on 4 x H200 at 64K tokens per GPU (benchmarks/results/
context-parallel-h200.json) the seconds are within 20 %; at 16K tokens, launching the many small kernels takes longer,
up to 8 ms.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from moba_train.config.run import CPLayout, CPTransport

GATHERING: tuple[CPTransport, ...] = ("allgather", "hierarchical")
"""Those that gather keys and values, in slices."""

NODE_RATE = 300e9
"""Bytes per second a rank receives from its node: 4 x H200, messages of 256 MiB (ring 302, all-gather 325, all-to-all
305 GB/s)."""
NETWORK_RATE = 50e9
"""The same between nodes: one 400 Gbit/s adapter per GPU, not measured."""
COPY_RATE = 4000e9
"""Bytes per second that are read and written in a GPU's memory when rows are put in order, merged and summed: fitted
to transfers measured on H200 (see above)."""
SEVERAL_SLICES = 4
"""Slices of keys and values where one does not fit in memory, or where they come over the network. Inside a node one is
the fastest: narrower launches cost more than what is hidden beside them (benchmarks/results/context-slices-h200.json,
context-slices-dense-h200.json)."""


@dataclass(frozen=True)
class Scheme:
    """How a sequence is spread over ranks, and how they exchange it."""

    ranks: int
    """`parallel.cp`"""
    transport: CPTransport
    layout: CPLayout
    node: int
    """So many consecutive ranks share a node; a divisor of `ranks`, or `ranks` itself."""
    ring_depth: int | None = None
    """Buffers of the ring; None: one for each rank."""
    slices: int = 1
    """That all-gather and hierarchical gather keys and values in, if there are so many heads; two are in memory at
    once."""


@dataclass(frozen=True)
class Shape:
    """The attention of one layer, as far as its transport is concerned."""

    tokens: int
    """Of the whole packed sequence."""
    heads: int
    """Query heads on one rank, after tensor parallelism."""
    kv_heads: int
    head_dim: int
    element_bytes: int = 2
    couples_heads: bool = False
    """`LocalAttention.couples_heads` of any layer."""

    @property
    def q_bytes(self) -> int:
        """Of one token's queries; its output has as many."""
        return self.heads * self.head_dim * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True)
class Cost:
    """A prediction for one layer, forward and backward."""

    node_bytes: float
    """Received by a rank over the links of its node."""
    network_bytes: float
    """Received through a rank's network adapter: the busiest one."""
    copied_bytes: float
    """Read and written in a rank's own memory."""
    memory_bytes: float
    """Buffers of the pass that needs more."""
    upfront: float
    """Share of the transfer that attention must wait for before it has anything to do."""

    @property
    def transfer_seconds(self) -> float:
        """Of the bytes that are received."""
        return self.node_bytes / NODE_RATE + self.network_bytes / NETWORK_RATE

    @property
    def seconds(self) -> float:
        """If nothing were hidden behind attention."""
        return self.transfer_seconds + self.copied_bytes / COPY_RATE

    def exposed_seconds(self, attention_seconds: float) -> float:
        """What remains to be waited for beside so much attention, at best; copies cannot be hidden."""
        hidden = min((1 - self.upfront) * self.transfer_seconds, attention_seconds)
        return self.seconds - hidden


def check_sizes(scheme: Scheme) -> None:
    """Raises ValueError for a scheme that no shape can be run with."""
    kind, ranks, node = scheme.transport, scheme.ranks, scheme.node
    if kind not in get_args(CPTransport):
        raise ValueError(f"parallel.cp_transport: {kind!r} given, allowed: {', '.join(get_args(CPTransport))}")
    if ranks < 1:
        raise ValueError(f"parallel.cp: {ranks} given, at least 1 needed")
    if scheme.ring_depth is not None and scheme.ring_depth < 2:
        raise ValueError(f"parallel.cp_ring_depth: {scheme.ring_depth} given, at least 2 (one to send, one to receive)")
    if kind == "hierarchical" and (ranks % node or not 1 < node < ranks):
        raise ValueError(
            f"parallel.cp_transport: 'hierarchical' needs several nodes with equally many ranks each, more than one; "
            f"parallel.cp is {ranks}, with {node} in a node; use ulysses, allgather or ring"
        )


def check_heads(scheme: Scheme, heads: int, kv_heads: int, couples_heads: bool) -> None:
    """Raises ValueError when the transport cannot share so many heads (see `Shape`) among its ranks."""
    kind, ranks, node = scheme.transport, scheme.ranks, scheme.node
    if kind not in ("ulysses", "hierarchical"):
        return
    among = node if kind == "hierarchical" else ranks
    if heads % among:
        raise ValueError(
            f"parallel.cp_transport: {kind!r} cannot share {heads} query heads among {among} ranks; use allgather or "
            f"ring, or set parallel.cp so that the heads are divisible"
        )
    if kv_heads % among and among % kv_heads:
        raise ValueError(
            f"parallel.cp_transport: {kind!r} cannot share {kv_heads} key/value heads among {among} ranks: one number "
            f"must divide the other; use allgather or ring"
        )
    if couples_heads and kv_heads % among:
        raise ValueError(
            f"parallel.cp_transport: {kind!r} would tear the query heads of {kv_heads} key/value heads apart among "
            f"{among} ranks, and an attention chooses for them together (attention.moba.select: group); use allgather "
            f"or ring, or select: head"
        )


def cost(scheme: Scheme, shape: Shape) -> Cost:
    """The prediction for a supported scheme."""
    return _COSTS[scheme.transport](scheme, shape)


def _allgather_cost(scheme: Scheme, shape: Shape) -> Cost:
    received = 3 * _others_tokens(scheme, shape) * shape.kv_bytes  # keys and values twice, their gradients once
    slices = _slices(scheme, shape.kv_heads)
    buffers = _gather_buffers(slices, shape.tokens * shape.kv_bytes)
    copied = _gather_copies(scheme, slices, shape.tokens / scheme.ranks * shape.q_bytes, shape.kv_bytes, shape.tokens)
    # NCCL's rings enter a node through all of its adapters.
    network = 0 if scheme.node == scheme.ranks else received / scheme.node
    return Cost(received, network, copied, buffers, upfront=1 / slices)


def _slices(scheme: Scheme, kv_heads: int) -> int:
    """How many a rank's key/value heads make: equally wide ones, but for the last."""
    return -(-kv_heads // -(-kv_heads // scheme.slices))


def _gather_buffers(slices: int, kv_bytes: float) -> float:
    """Of two slices of all keys and values, which have so many bytes, and of their gradients."""
    return 2 * min(1, 2 / slices) * kv_bytes


def _gather_copies(scheme: Scheme, slices: int, q_bytes: float, kv_bytes: float, tokens: int) -> float:
    """`q_bytes` are those of a rank's queries, `kv_bytes` those of a token's keys and values."""
    # Results are put in their place; what several slices are cut from is copied, too.
    q_copies, kv_copies = (4, 5) if slices == 1 else (12, 9)
    own = q_copies * q_bytes + kv_copies * kv_bytes * tokens / scheme.ranks
    # The gradients of all keys are laid out for their owners and summed there; zigzag shards are put in order, too.
    return own + (8 if scheme.layout == "zigzag" else 4) * kv_bytes * tokens


def _ring_cost(scheme: Scheme, shape: Shape) -> Cost:
    received = 3 * _others_tokens(scheme, shape) * shape.kv_bytes
    depth, tokens = min(scheme.ring_depth or scheme.ranks, scheme.ranks), shape.tokens / scheme.ranks
    buffers = (2 * depth + 2) * tokens * shape.kv_bytes  # chunks, and their gradients going home
    # For every chunk, out and dq are merged in float32 (13 + 5 of a query's bytes) and its gradients packed and summed.
    copied = tokens * ((18 * scheme.ranks + 8) * shape.q_bytes + (7 * scheme.ranks + 5) * shape.kv_bytes)
    network = 0 if scheme.node == scheme.ranks else received  # one link enters each node
    return Cost(received, network, copied, buffers, upfront=0)


def _ulysses_cost(scheme: Scheme, shape: Shape) -> Cost:
    swapped, copied, buffers = _swap_cost(scheme, shape, scheme.ranks)
    within = scheme.node / scheme.ranks
    return Cost(swapped * within, swapped * (1 - within), copied, buffers, upfront=1)


def _hierarchical_cost(scheme: Scheme, shape: Shape) -> Cost:
    swapped, copied, buffers = _swap_cost(scheme, shape, scheme.node)
    kv_bytes = shape.kv_bytes * max(1, scheme.node / shape.kv_heads) / scheme.node
    gathered = 3 * (1 - scheme.node / scheme.ranks) * shape.tokens * kv_bytes
    slices = _slices(scheme, max(1, shape.kv_heads // scheme.node))
    copied += _gather_copies(scheme, slices, shape.tokens / scheme.ranks * shape.q_bytes, kv_bytes, shape.tokens)
    within, across = swapped / NODE_RATE, gathered / NETWORK_RATE
    upfront = (within + across / slices) / (within + across)
    return Cost(swapped, gathered, copied, buffers + _gather_buffers(slices, shape.tokens * kv_bytes), upfront)


def _others_tokens(scheme: Scheme, shape: Shape) -> float:
    return shape.tokens * (1 - 1 / scheme.ranks)


def _swap_cost(scheme: Scheme, shape: Shape, ranks: int) -> tuple[float, float, float]:
    """Bytes (received, copied, of buffers) of exchanging a rank's tokens for heads among `ranks`.

    Forward: q, k and v go out, out comes back. Backward: those, out and its gradient go out, dq, dk and dv come back.
    All are cut by heads before or joined after, and those of zigzag shards put in order.
    """
    tokens, kv_bytes = shape.tokens / scheme.ranks, shape.kv_bytes * max(1, ranks / shape.kv_heads)
    received = tokens * (6 * shape.q_bytes + 3 * kv_bytes) * (1 - 1 / ranks)
    copied = tokens * (12 * shape.q_bytes + 6 * kv_bytes)
    if scheme.layout == "zigzag":
        copied += tokens * (14 * shape.q_bytes + 7 * kv_bytes)
    return received, copied, 2 * tokens * (3 * shape.q_bytes + kv_bytes)


_COSTS: dict[str, Callable[[Scheme, Shape], Cost]] = {
    "allgather": _allgather_cost,
    "ulysses": _ulysses_cost,
    "hierarchical": _hierarchical_cost,
    "ring": _ring_cost,
}


def choose(
    transport: CPTransport | Literal["auto"],
    layout: CPLayout | Literal["auto"],
    shape: Shape,
    *,
    ranks: int,
    node: int,
    work_grows: bool,
    memory_bytes: float | None = None,
    ring_depth: int | None = None,
    slices: int | None = None,
) -> tuple[Scheme, str]:
    """The scheme to use, and why, in lines to print.

    `node`: consecutive ranks that share a node. `work_grows`: whether any layer's work grows with a token's position
    to the end (dense attention), so that contiguous shards would be unequal. `memory_bytes`: what the buffers of one
    layer may take; None: no limit. `ring_depth`: that of `Scheme`. `slices`: that of `Scheme`, None: one, but several
    over the network and where one does not fit. `auto` takes Ulysses inside a node when ranks share out key/value heads
    evenly, else the transport with the least transfer time of those that fit; when none does, a ring with two buffers.

    Raises ValueError, naming the key, for a transport that was asked for and cannot do these sizes.
    """

    def scheme(kind: CPTransport, depth: int | None = ring_depth) -> Scheme:
        # With every transport but Ulysses a rank's work is that of its own queries; around a ring it is that of the
        # chunks that they see, too, and later queries see more. So do MoBA's until they have topk blocks behind them:
        # zigzag shards are up to 27 % faster under all-gather at 64K tokens, and never slower
        # (benchmarks/results/context-parallel-h200.json); under hierarchical they cost a copy.
        unequal = kind in ("ring", "allgather") or (work_grows and kind != "ulysses")
        balanced: CPLayout = "zigzag" if unequal else "contiguous"
        made = Scheme(ranks, kind, balanced if layout == "auto" else layout, node, depth, slices or 1)
        _check(made, shape)
        several = slices is None and kind in GATHERING and (node < ranks or not fits(made))
        return replace(made, slices=SEVERAL_SLICES) if several else made

    def fits(made: Scheme) -> bool:
        return memory_bytes is None or cost(made, shape).memory_bytes <= memory_bytes

    if transport != "auto":
        only = scheme(transport)
        return only, f"context parallelism: {transport} as asked for, {_describe(only, cost(only, shape))}"

    lines, fitting = [], []
    for kind in get_args(CPTransport):
        try:
            candidate = scheme(kind)
        except ValueError as error:
            lines.append(f"  {kind}: {str(error).partition(': ')[2]}")
            continue
        predicted = cost(candidate, shape)
        line = f"  {_describe(candidate, predicted)}"
        if fits(candidate):
            fitting.append(((not _whole_heads(candidate, shape), predicted.seconds), candidate))
        else:
            line += f": does not fit in {max(0, memory_bytes or 0) / 2**20:.0f} MiB"
        lines.append(line)
    chosen = min(fitting, key=lambda pair: pair[0])[1] if fitting else scheme("ring", 2)
    return chosen, "\n".join([f"context parallelism: auto takes {_describe(chosen, cost(chosen, shape))}", *lines])


def _whole_heads(scheme: Scheme, shape: Shape) -> bool:
    """Ulysses inside a node, key/value heads not repeated: the fastest within 1 % from 64K tokens per GPU on.

    Ranks attend to whole sequences with some heads, in fuller launches and less memory. On 4 x H200 at 256K tokens,
    against all-gather: dense 1 % less time, MoBA 4096/12 9 %, 512/8 the same (benchmarks/results/
    context-slices-dense-h200.json, context-parallel-h200.json).
    """
    return scheme.transport == "ulysses" and scheme.node == scheme.ranks and shape.kv_heads % scheme.ranks == 0


def _check(scheme: Scheme, shape: Shape) -> None:
    check_sizes(scheme)
    check_heads(scheme, shape.heads, shape.kv_heads, shape.couples_heads)


def _describe(scheme: Scheme, predicted: Cost) -> str:
    slices = f", {scheme.slices} slices" if scheme.transport in GATHERING and scheme.slices > 1 else ""
    return (
        f"{scheme.transport} over {scheme.ranks} ranks, {scheme.layout}{slices}: a layer receives "
        f"{predicted.node_bytes / 2**20:.0f} MiB in the node and {predicted.network_bytes / 2**20:.0f} MiB from others "
        f"({1e3 * predicted.seconds:.2f} ms unhidden), buffers {predicted.memory_bytes / 2**20:.0f} MiB"
    )
