"""Tokens on their way to experts of other ranks: uneven numbers, nothing at all, the shared expert meanwhile, and
torch.compile, which takes the layer as one graph."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moba_train.mechanisms.experts import exchange
from moba_train.parallel.world import joined_world
from tests.mechanisms.experts_model import EXPERTS, HIDDEN, drawn, mixture, options
from tests.run.trainer_ranks import Ranks


def step(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Result, and gradient of the rows."""
    x = x.detach().requires_grad_()
    out, _ = layer(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def worker(all_to_first: bool) -> None:
    """Half of the experts on each of two ranks, which have different rows."""
    torch.compiler.reset()
    with joined_world() as world:
        whole = mixture(options(shared=1, router={"balance": "bias"}), torch.bfloat16)
        if all_to_first:
            whole.bias[: EXPERTS // 2] = 100
        part = deepcopy(whole)
        for stack in (part.experts.gate_proj, part.experts.up_proj, part.experts.down_proj):
            stack.weight = nn.Parameter(stack.weight.detach().chunk(world.size)[world.rank].clone())
        group = dist.group.WORLD
        assert group is not None
        part.ep_group = exchange.named(group)
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


@pytest.mark.parametrize("all_to_first", [False, True], ids=["uneven", "one rank gets nothing"])
def test_rows_are_computed_by_the_ranks_that_have_their_experts(all_to_first: bool, ranks: Ranks) -> None:
    ranks.work(worker, (all_to_first,), 2)
