"""Tokens on their way to experts of other ranks: uneven numbers, nothing at all, the shared expert meanwhile, and
torch.compile, which takes the layer as one graph."""

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.mechanisms.experts import exchange
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.parallel.world import World, joined_world
from tests.mechanisms.experts_model import ACTIVE, EXPERTS, HIDDEN, LivingRows, drawn, mixture, options
from tests.run.trainer_ranks import Ranks


def step(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Result, and gradient of the rows."""
    x = x.detach().requires_grad_()
    out, _ = layer(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def divided(whole: MixtureOfExperts, world: World) -> Any:
    """A copy with this rank's part of the experts."""
    part = deepcopy(whole)
    for stack in (part.experts.gate_proj, part.experts.up_proj, part.experts.down_proj):
        stack.weight = nn.Parameter(stack.weight.detach().chunk(world.size)[world.rank].clone())
    group = dist.group.WORLD
    assert group is not None
    part.ep_group = exchange.named(group)
    return part


def worker(all_to_first: bool) -> None:
    """Half of the experts on each of two ranks, which have different rows."""
    torch.compiler.reset()
    with joined_world() as world:
        whole = mixture(options(shared=1, router={"balance": "bias"}), torch.bfloat16)
        if all_to_first:
            whole.bias[: EXPERTS // 2] = 100
        part = divided(whole, world)
        x = drawn(20 + 30 * world.rank, HIDDEN, seed=world.rank).bfloat16()
        want = step(whole, x)
        under_way = []
        assert part.shared is not None
        hook = part.shared.register_forward_hook(lambda *_: under_way.append(len(exchange._works)))
        for got, value in zip(step(part, x), want, strict=True):
            torch.testing.assert_close(got, value, rtol=0.02, atol=0.02)
        hook.remove()
        assert under_way == [1], "the shared expert computes while rows travel"
        assert not exchange._works
        ends_E = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (len(x) // EXPERTS)
        counts = exchange.exchange_counts(ends_E, part.ep_group)
        rows = x[: ends_E[-1]]
        for _ in range(2):
            exchange.start_exchange(rows, rows[:, :1].float(), *counts, part.ep_group)
        assert len(exchange._works) == 1, "rows that nothing takes do not pile up"
        part.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        for got, value in zip(step(part, x), want, strict=True):
            torch.testing.assert_close(got, value, rtol=0.02, atol=0.02)


def counting_worker() -> None:
    """The counts of tools/plan/step_time.py (`_expert_traffic`) and memory/layer_memory.py (`feed_forward_gradients`):
    rows travel four times, or six times where an uncompiled layer is recomputed, five times if it is compiled
    (test_experts_compiled.py); five tensors of rows live at most, of which one is kept. Compiled, by the order of the
    operators there, also five: what is sent of rows and gradients, what arrives of both, and the sorted gradients."""
    with joined_world() as world:
        layer = divided(mixture(options(), torch.bfloat16), world)
        tokens = 512
        x = drawn(tokens, HIDDEN, seed=world.rank).bfloat16().requires_grad_()
        sent: list[int] = []
        all_to_all = dist.all_to_all_single

        def noted(out: Tensor, given: Tensor, *arguments: Any, **further: Any) -> Any:
            if given.shape[1:] == (HIDDEN,):
                sent.append(len(given))
            copy = torch.empty_like(out)  # gloo's thread may hold what it was given for longer
            all_to_all(copy, given.clone(), *arguments, **further | {"async_op": False})
            out.copy_(copy)
            return SimpleNamespace(wait=lambda: None)

        for run, times, kept in ((layer, 4, 1.0), (partial(checkpoint, layer, use_reentrant=False), 6, 0.0)):
            sent.clear()
            with patch.object(dist, "all_to_all_single", noted), LivingRows(tokens) as living:
                out, _ = run(x)
                assert living.now / (ACTIVE * tokens) == pytest.approx(kept, abs=0.3)
                out.sum().backward()
            assert len(sent) == times
            assert living.most / (ACTIVE * tokens) == pytest.approx(5, abs=0.3)


def test_rows_travel_and_live_as_the_plan_counts(ranks: Ranks) -> None:
    ranks.work(counting_worker, (), 2)


@pytest.mark.parametrize("all_to_first", [False, True], ids=["uneven", "one rank gets nothing"])
def test_rows_are_computed_by_the_ranks_that_have_their_experts(all_to_first: bool, ranks: Ranks) -> None:
    ranks.work(worker, (all_to_first,), 2)
