"""The composition of block attention from varlen kernels, which gathers and joins in Triton's interpreter."""

from typing import Any

import pytest
import torch

from moba_train.attention.kernels import composed
from moba_train.attention.kernels.varlen.kernels import Cpu
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import assert_results, build, exact, inputs, layout_of, run, run_in_parts
from tests.attention.quick_interpreter import quicken

quicken()


@pytest.mark.parametrize(
    ("lengths", "limit", "kv_heads", "block_size", "topk"),
    [([150, 70], None, 2, 64, 3), ([130, 0, 1, 90], 300, 1, 50, 2)],
)
def test_the_composition_gathers_and_joins_with_kernels(
    lengths: list[int], limit: int | None, kv_heads: int, block_size: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim: limit)
    tensors, layout = inputs(lengths, 4, kv_heads, 64, torch.float32, "cpu"), layout_of(lengths, "cpu")
    ours = build("composed", 64, block_size=block_size, topk=topk)
    whole, selection = run(ours, tensors, layout)
    assert len(selection) == 3, "no lists from the kernels"
    shards = [ranges((0, 37), (180, sum(lengths))), ranges((37, 180))]
    sharded, selected = run_in_parts(ours, tensors, layout, shards, all_keys=True)
    assert torch.equal(selected, selection[0])
    want = exact(tensors, layout, selection[0], block_size, ours.scale)
    for got in (whole, sharded):
        assert_results(got, want)


def test_queries_may_lie_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an export: FlashAttention-2 gives its results in the memory order of its queries."""
    forward = Cpu.forward

    def in_order_of_queries(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward(q, *rest)
        return torch.empty_like(q).copy_(out), lse

    monkeypatch.setattr(Cpu, "forward", staticmethod(in_order_of_queries))
    tensors, layout = inputs([150, 70], 4, 2, 64, torch.float32, "cpu"), layout_of([150, 70], "cpu")
    tensors[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    ours = build("composed", 64, block_size=64, topk=3)
    got, selection = run(ours, tensors, layout)
    assert_results(got, exact(tensors, layout, selection[0], 64, ours.scale))
