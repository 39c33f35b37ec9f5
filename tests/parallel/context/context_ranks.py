"""Checks of ranks in separate processes. All checks run in one set of processes, because starting them is slow."""

import faulthandler
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moba_train.attention.layout import Layout
from moba_train.attention.operators import SAVED_OPERATORS
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.registry import TRANSPORTS
from moba_train.run.determinism import deterministic
from tests.attention.helpers import triple
from tests.forked import run_processes
from tests.parallel.context.context_cases import (
    NAMES,
    Case,
    Result,
    assert_same,
    for_the_same_selection,
    on_a_rank,
    on_one_device,
    padded_shards,
    selected_by_ranks,
)

CASES = {
    "moba": Case((12, 0, 1, 33), heads=12, kv_heads=12),
    "dense": Case((12, 0, 1, 33), heads=12, kv_heads=12, topk=None),
    "shared heads, bf16": Case((41, 6), heads=12, kv_heads=1, dtype=torch.bfloat16),
}
STRATEGIES = {
    f"{transport}, {layout}, {ranks} ranks": CPStrategy(
        ranks, transport, layout, node, depth, slices=4 if layout == "contiguous" else 1
    )
    for ranks in (1, 2, 3, 4)
    for layout in ("contiguous", "zigzag")
    for transport, node, depth in (
        *((name, ranks, None) for name in TRANSPORTS if name != "hierarchical"),
        *([("hierarchical", 2, None)] if ranks == 4 else []),
    )
} | {
    "ring, zigzag, 4 ranks, 2 buffers": CPStrategy(4, "ring", "zigzag", 4, 2),
    "ring in parts, zigzag, 4 ranks": CPStrategy(4, "ring", "zigzag", 2),
    "ring in parts, contiguous, 4 ranks": CPStrategy(4, "ring", "contiguous", 1),
    "ring in parts, zigzag, 2 ranks": CPStrategy(2, "ring", "zigzag", 1),
}


class Member:
    """This process and the groups of 1 to `world` ranks that it belongs to."""

    def __init__(self, world: int, device: torch.device) -> None:
        self.device = device
        self.groups: dict[int, dist.ProcessGroup] = {}
        for size in range(1, world + 1):
            for first in range(0, world - size + 1, size):
                members = list(range(first, first + size))
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    self.groups[size] = group

    def engine(self, strategy: CPStrategy) -> ContextParallel:
        return context_engine(strategy, self.groups[strategy.ranks], self.device)

    def everyone(self, ranks: int, mine: object) -> list[Any]:
        """`mine` of all ranks of the group, in their order."""
        theirs = [None] * ranks
        dist.all_gather_object(theirs, mine, group=self.groups[ranks])
        return theirs


Call = tuple[str, int, list[int], list[tuple[int, ...]]]
"""(name, ranks of the group, distances in the ring, shapes)."""


@contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Record the calls to `Communicator` in order, as far as they must agree on all ranks."""
    calls: list[Call] = []
    names = ("all_gather", "all_gather_by_ring", "all_to_all", "all_to_all_uneven", "all_reduce", "send_recv")
    methods = {name: getattr(Communicator, name) for name in names}

    def recording(name: str, communicator: Communicator, *args: Any, **options: Any) -> Any:
        sizes = [] if name == "all_to_all_uneven" else [tuple(x.shape) for x in args if isinstance(x, Tensor)]
        calls.append((name, communicator.size, [x % communicator.size for x in args if isinstance(x, int)], sizes))
        return methods[name](communicator, *args, **options)

    for name in methods:
        setattr(Communicator, name, lambda *args, name=name, **options: recording(name, *args, **options))
    try:
        yield calls
    finally:
        for name, method in methods.items():
            setattr(Communicator, name, method)


def equal_to_one_device(
    case: Case, strategy: CPStrategy, member: Member, engine: ContextParallel | None = None
) -> None:
    """Results and gradients, the selected blocks, the same calls on all ranks, the same bits again.

    It fails only after the last message; otherwise the other ranks would wait for ever.
    """
    if strategy.ranks not in member.groups:
        return
    engine = engine or member.engine(strategy)
    inputs, want = one_device(case, member.device)
    with recorded_calls() as calls:
        (got, selection), (again, _) = (on_a_rank(engine, case, inputs) for _ in range(2))
    sequence, rank = engine.sequence(case.total), engine.transport.rank
    parts = member.everyone(strategy.ranks, (calls, [x.cpu() for x in selection], [x.cpu() for x in got.tensors]))
    all_calls, plans, shards = zip(*parts, strict=True)
    assert all(theirs == calls for theirs in all_calls), f"calls differ: {all_calls}"
    assert calls or strategy.ranks == 1, "nothing was recorded"
    assert all(torch.equal(a, b) for a, b in zip(got.tensors, again.tensors, strict=True)), "two runs differ"
    if want.selected is not None:
        assert torch.equal(selected_by_ranks([tuple(p) for p in plans], strategy, sequence), want.selected.cpu())
    if case.dtype == torch.float64:
        assert_same(got.tensors, [sequence.shard(x, rank)[: sequence.tokens(rank)] for x in want.tensors])
    else:
        whole = [sequence.to_packed(padded_shards(list(x), sequence.rows)) for x in zip(*shards, strict=True)]
        assert_as_exact(whole, case, member.device)


@lru_cache(maxsize=4)
def one_device(case: Case, device: torch.device) -> tuple[list[Tensor], Result]:
    """Inputs of a case and the result of one device, kept for the strategies that are compared with it."""
    inputs = case.inputs(device)
    return inputs, on_one_device(case, inputs)


@lru_cache(maxsize=4)
def exact(case: Case, device: torch.device) -> list[Tensor]:
    """The result in float64 for the blocks that one device selects."""
    inputs, one = one_device(case, device)
    return for_the_same_selection(case, one.selected, inputs)


def assert_as_exact(got: list[Tensor], case: Case, device: torch.device) -> None:
    """Check that errors against float64 are close to those of one device.

    Partial gradients are rounded to bf16 before their owner sums them, twice in `hierarchical`. One device on the CPU
    computes in float32 and rounds once; kernels also round probabilities.
    """
    bar = 1.5 if device.type == "cuda" else 2.5
    _, one = one_device(case, device)
    for name, ours, single, right in zip(NAMES, got, one.tensors, exact(case, device), strict=True):
        norm = right.norm().item()
        errors = [((x.to(device).double() - right).norm() / norm).item() for x in (ours, single)]
        assert errors[0] <= bar * errors[1] + 1e-4, (
            f"{name}: relative error {errors[0]:.2e}, one device {errors[1]:.2e}"
        )


def recomputation_sends_nothing(member: Member) -> None:
    """With the activation checkpointing that FSDP uses, recomputation does not repeat communication."""
    case, strategy = CASES["moba"], STRATEGIES["allgather, zigzag, 2 ranks"]
    engine, attention, layout = member.engine(strategy), case.attention(), case.layout()
    shards = [engine.sequence(case.total).shard(x, engine.transport.rank) for x in case.inputs()]
    contexts = partial(create_selective_checkpoint_contexts, list(SAVED_OPERATORS))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engine(q * 1.5, k, v, attention, layout)[0]

    def gradients(recompute: bool) -> tuple[list[Tensor], list[Call]]:
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        with recorded_calls() as calls:
            out = checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts) if recompute else run(*leaves)
            grads = torch.autograd.grad(out, leaves, shards[3])
        return list(grads), calls

    (plain, plain_calls), (recomputed, calls) = gradients(False), gradients(True)
    assert calls == plain_calls
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def nothing_gathered_is_saved(member: Member) -> None:
    """For the backward pass, a rank saves only its own rows and the plan for them."""
    case = CASES["dense"]
    for transport in ("allgather", "ring", "ring in parts", "ulysses"):
        engine = member.engine(STRATEGIES[f"{transport}, contiguous, 4 ranks"])
        shards = [engine.sequence(case.total).shard(x, engine.rank).requires_grad_() for x in case.inputs()[:3]]
        out, _ = engine(*triple(shards), case.attention(), case.layout())
        node: Any = out.grad_fn
        saved = [x.shape[0] for x in node.saved_tensors if x is not None]
        assert max(saved) == shards[0].shape[0] == 12, saved


def compiles_without_graph_breaks(member: Member) -> None:
    """torch.compile gives the same bits without a graph break, also when documents change from step to step."""
    case = CASES["moba"]
    if dist.get_rank() >= 2:  # one pair is enough: tracing takes seconds
        return
    transports = (
        "allgather, zigzag",
        "ring, zigzag",
        "ring in parts, zigzag",
        "ulysses, contiguous",
        *(["dispatch, zigzag"] if "dispatch" in TRANSPORTS else []),
    )
    for name in (f"{transport}, 2 ranks" for transport in transports):
        strategy = STRATEGIES[name]
        engine, attention = member.engine(strategy), case.attention()
        shards = [engine.sequence(case.total).shard(x, engine.transport.rank) for x in case.inputs()]

        def run(
            q: Tensor, k: Tensor, v: Tensor, layout: Layout, engine: Any = engine, attention: Any = attention
        ) -> Tensor:
            return engine(q * 1.5, k, v, attention, layout)[0]

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        for lengths in ((46,), (12, 0, 1, 33)):
            layout = Case(lengths).layout()
            results = []
            for function in (run, compiled):
                leaves = [x.clone().requires_grad_() for x in shards[:3]]
                out = function(*triple(leaves), layout)
                results.append([out, *torch.autograd.grad(out, leaves, shards[3])])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


def creation_makes_all_connections(member: Member) -> None:
    """Creating the engine has made every call that a step makes: NCCL connects two ranks at their first message."""

    def connections(calls: list[Call]) -> set[tuple[str, int, tuple[int, ...]]]:
        return {
            ("send_recv", ranks, (1,))
            if name == "all_gather_by_ring"
            else (name.removesuffix("_uneven"), ranks, tuple(distance))
            for name, ranks, distance, _ in calls
        }

    for transport in ("ring in parts", *TRANSPORTS):
        with recorded_calls() as created:
            engine = member.engine(STRATEGIES[f"{transport}, zigzag, 4 ranks"])
        with recorded_calls() as used:
            on_a_rank(engine, CASES["moba"], CASES["moba"].inputs())
        assert used, transport
        assert connections(used) <= connections(created), transport


def refusals_come_before_any_message(member: Member) -> None:
    strategy = STRATEGIES["ulysses, contiguous, 4 ranks"]
    engine = member.engine(strategy)
    case = Case((46,), heads=6, kv_heads=6)
    q, k, v, _ = (engine.sequence(46).shard(x, engine.transport.rank) for x in case.inputs())
    with recorded_calls() as calls:
        fewer, more = ([x[1:] for x in (q, k, v)], [torch.cat([x, x[:1]]) for x in (q, k, v)])
        for bad, word in (((q, k, v), "parallel.cp_transport"), (fewer, "11 rows given"), (more, "13 rows given")):
            with pytest.raises(ValueError, match=word):
                engine(*triple(bad), case.attention(), case.layout())
    assert calls == []


_LONG_S = 60.0
"""Seconds after which, and again, a check prints where each rank is."""
Check = Callable[[Member], None]
CHECKS: dict[str, Check] = {
    f"{name}, {how}": partial(equal_to_one_device, case, strategy)
    for how, strategy in STRATEGIES.items()
    for name, case in CASES.items()
    if name == "moba" or strategy.ranks == 4  # the others run on threads, in float64: test_context_in_process.py
} | {
    "recomputation": recomputation_sends_nothing,
    "saved tensors": nothing_gathered_is_saved,
    "compilation": compiles_without_graph_breaks,
    "connections": creation_makes_all_connections,
    "refusals": refusals_come_before_any_message,
}


def run_checks(world: int, checks: dict[str, Check], folder: Path, device: str = "cpu") -> dict[str, str]:
    """Run the checks on `world` ranks and return the errors of each check that failed on any of them."""
    run_processes(_rank, (world, checks, str(folder), device), world, device)
    errors: dict[str, str] = {}
    for rank in range(world):
        for name, text in json.loads((folder / f"errors{rank}.json").read_text()).items():
            errors[name] = errors.get(name, "") + f"\nrank {rank}: {text}"
    return errors


def say(text: str) -> None:
    """Print a line on the first rank, which `pytest -s` shows at once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _rank(rank: int, world: int, checks: dict[str, Check], folder: str, device: str) -> None:
    torch.set_num_threads(1)
    where = torch.device(device)
    if device == "cuda":
        host, number = divmod(rank, torch.cuda.device_count())
        if world > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = str(host)  # NCCL refuses two ranks of one host on the same GPU
        where = torch.device(device, number)
        torch.cuda.set_device(where)
    errors = {}
    with deterministic(device == "cuda"):  # two runs are compared bit by bit
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=dist.FileStore(f"{folder}/store", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
            device_id=where if device == "cuda" else None,
        )
        try:
            member = Member(world, where)
            for name, check in checks.items():
                began = time.perf_counter()
                faulthandler.dump_traceback_later(_LONG_S, repeat=True)
                try:
                    check(member)
                except Exception:
                    errors[name] = traceback.format_exc()
                say(f"{name}: {'failed, ' if name in errors else ''}{time.perf_counter() - began:.1f} s")
        finally:
            faulthandler.cancel_dump_traceback_later()
            Path(f"{folder}/errors{rank}.json").write_text(json.dumps(errors))
            dist.destroy_process_group()
