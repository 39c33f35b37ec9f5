"""Which backend a batch gets, and what is said about it. No GPU needed: nothing is computed."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moba_train.attention import moba
from moba_train.attention.kernels import block_attention, composed, table
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common import reference
from moba_train.attention.layout import Layout
from moba_train.attention.moba import gate
from moba_train.attention.moba.moba_local import pick_selector
from moba_train.attention.protocol import BackwardState
from tests.attention.helpers import ranges
from tests.attention.kernel_checks import build
from tests.attention.kernel_checks import layout_of as packed

KEY = "attention.moba.backend"


@pytest.fixture(autouse=True)
def a_gpu_with_triton_and_flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    packages = frozenset({"torch's FlashAttention-2"})
    machine = table.Machine("cuda", (9, 0), "3.6.0", packages=packages)
    monkeypatch.setattr(
        table, "this_machine", lambda device: machine if device.type == "cuda" else table.Machine("cpu")
    )
    monkeypatch.setattr(block_attention, "_backend", lambda name: name)
    monkeypatch.setattr(moba, "gate_kernels", "triton", raising=False)
    monkeypatch.setattr(composed, "refuses", lambda *call: "")
    block_attention._log_once.cache_clear()
    table._selection_problem.cache_clear()
    yield
    table._selection_problem.cache_clear()


def q(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(64, 2, head_dim))


def pick(
    wanted: str = "auto", x: Any = None, block_size: int = 512, history_blocks: int = 2, layout: Layout | None = None
) -> Any:
    return BlockAttention(block_size, 1.0, wanted, KEY).pick(x or q(), layout or packed([64], "cpu"), history_blocks)


def test_auto_takes_triton_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert [pick(), pick()] == ["triton", "triton"]
    assert [record.message for record in caplog.records] == [
        "attention.moba.backend: auto takes triton, which can do head dim 128 and block_size 512"
    ]


def test_auto_warns_when_only_plain_pytorch_is_left_and_names_every_reason() -> None:
    with pytest.warns(
        UserWarning, match=r"plain PyTorch.*dtype torch\.float32.*FlashAttention-2: dtype torch\.float32"
    ):
        assert pick(x=q(dtype=torch.float32)) == "reference"


def test_a_backend_is_picked_once_for_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers and both passes of a step meet the same layout."""
    attention, layout, queries = BlockAttention(512, 1.0, "auto", "of.a.layout"), packed([64], "cpu"), q()
    first = attention._picked(queries, layout, 2)
    monkeypatch.setattr(table, "_best", None)
    assert attention._picked(queries, layout, 2) == first


def test_a_backend_by_name_that_cannot_do_a_batch_is_refused_with_the_reason() -> None:
    part = packed([256], "cpu").part(None, ranges((0, 64), (96, 160)))
    message = (
        rf"{KEY}: 'triton' cannot do this batch: a shard whose token ranges 0-64, 96-160 are less than .*use 'auto'"
    )
    with pytest.raises(ValueError, match=message):
        pick("triton", block_size=64, layout=part)


def test_composed_shares_the_selection_kernels_where_they_can_run() -> None:
    def pick(wanted: str, x: torch.Tensor, count: int = 2) -> Any:
        return pick_selector(wanted, x, packed([1], "cpu"), block_size=64, history_blocks=count)

    assert pick("composed", q(128)) == "triton"
    assert pick("composed", q(96)) is gate
    assert pick("auto", q(128)) == "triton"
    assert pick("auto", q(128), 127) == "triton"
    assert pick("auto", q(128), 128) is gate
    assert pick("reference", q(128)) is gate
    assert pick("auto", torch.zeros(1, 1, 128)) is gate


def test_the_selection_of_composed_is_the_blocks_alone_and_of_the_shape_that_tracing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    x = torch.zeros(9, 2, 16)
    attention, layout = build("composed", 16, block_size=4, topk=3), packed([9], "cpu")
    (selected,) = attention.select(x, attention.summarize(x, layout), layout)
    (empty,) = attention.empty_selection(x, x, layout)
    assert (empty.shape, empty.dtype) == (selected.shape, selected.dtype)


def test_the_backend_is_picked_once_for_a_layout_and_again_for_a_part_of_the_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    picked = []
    pick = BlockAttention.pick

    def watched(self: BlockAttention, q: torch.Tensor, layout: Layout, history_blocks: int) -> Any:
        picked.append(layout)
        return pick(self, q, layout, history_blocks)

    monkeypatch.setattr(BlockAttention, "pick", watched)
    layout = packed([12], "cpu")
    part = layout.part(None, ranges((0, 8)))
    blocks = BlockAttention(4, 0.25, "reference", KEY)
    q, kv = torch.randn(12, 2, 16), torch.randn(12, 1, 16)
    for _ in range(2):
        selection = blocks.selection(torch.zeros(2, 12, 1, dtype=torch.int32), q, layout, 1)
        out, lse = blocks.attend(q, kv, kv, layout, selection)
        blocks.attend_backward(BackwardState(out, q, kv, kv, out, lse), layout, selection)
        blocks.attend(q, kv[:8], kv[:8], part, selection)
    assert picked == [layout, part]


def test_the_reference_takes_a_selection_that_the_kernels_made() -> None:
    """A rank whose queries are one range selects with `triton`, then meets keys that only the reference takes."""
    layout = packed([256], "cpu")
    mine, theirs = layout.part(ranges((96, 160)), None), layout.part(ranges((96, 160)), ranges((0, 64), (96, 160)))
    assert pick(block_size=64, layout=mine) == "triton"
    with pytest.warns(UserWarning, match="token ranges 0-64, 96-160 are less than block_size 64 apart"):
        assert pick(block_size=64, layout=theirs) == "reference"
    x = torch.zeros(128, 2, 16)
    selection = tuple(torch.zeros(shape, dtype=torch.int32) for shape in ((2, 64, 2), (256,), (9,)))
    call: dict[str, Any] = {"block_size": 64, "scale": 1.0}
    out, lse = reference.attend(x[:64], x, x, theirs, selection, **call)
    assert out.shape == (64, 2, 16)
    reference.attend_backward(BackwardState(out, x[:64], x, x, out, lse), theirs, selection, **call)
