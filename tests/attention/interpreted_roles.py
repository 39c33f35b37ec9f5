"""The forward pass of long blocks by kernels in Gluon, from their own source; `.ci/run interpreted` starts it."""

from typing import Any

import pytest
import torch

from moba_train.attention.kernels.common.call import BlockCall
from moba_train.attention.kernels.hopper import blocks_from_512_forward
from moba_train.attention.layout import TokenRange
from tests.attention.gluon_interpreter import Interpreter
from tests.attention.kernel_checks import build, error, exact, inputs, layout_of
from tests.attention.quick_interpreter import quicken

quicken()


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "options", "shards"),
    [
        ([530, 1], 4, 2, {"block_size": 256, "topk": 3}, [None]),
        ([0, 300, 129], 3, 1, {"block_size": 384, "topk": 1}, [None]),
        ([600], 2, 1, {"block_size": 256, "topk": 2}, [((0, 77), (400, 600)), ((77, 400),)]),
        ([530, 1, 140], 4, 2, {"block_size": 128, "topk": 4}, [None]),  # one tile of keys
    ],
)
def test_attention_by_warps_with_roles_equals_the_reference(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    options: dict[str, Any],
    shards: list[tuple[tuple[int, int], ...] | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By few programs: each has several tiles, and some may have none."""
    for seed, name in enumerate(("forward_history", "forward_diagonal")):
        monkeypatch.setattr(blocks_from_512_forward, name, Interpreter(getattr(blocks_from_512_forward, name), seed))
    monkeypatch.setattr(blocks_from_512_forward, "_programs", lambda _call, _tiles: 5)
    monkeypatch.setattr(BlockCall, "forward_pass", "hopper/blocks_from_512_forward.py")
    q, k, v, _ = tensors = inputs(lengths, heads, kv_heads, 64, torch.float32, "cpu")
    layout, ours = layout_of(lengths, "cpu"), build("triton", 64, **options)
    means = ours.summarize(k, layout)
    selection = ours.select(q, means, layout)
    want = exact(tensors, layout, selection[0], options["block_size"], ours.scale)
    for ranges in shards:
        part = layout.part(tuple(TokenRange(*given) for given in ranges), None) if ranges else layout
        at = part.q_tokens if ranges else slice(None)
        out, lse = ours.attend(q[at], k, v, part, ours.select(q[at], means, part) if ranges else selection)
        assert error(out, want[0][at]) < 2e-6
        assert error(lse, want[1][:, at]) < 2e-6
