"""Which backend a call on a GPU gets, and what is said about it. No GPU needed: nothing is computed."""

import logging
from types import SimpleNamespace

import pytest
import torch

from moba_train.attention.blocks import available, backends, composed, reference
from moba_train.attention.blocks.attention import BlockAttention
from moba_train.attention.blocks.backends import pick_backend
from moba_train.attention.moba import gate
from moba_train.attention.moba.moba_local import pick_selector
from moba_train.attention.protocol import BackwardState
from tests.attention.kernel_checks import build
from tests.attention.kernel_checks import layout_of as packed

KEY = "attention.moba.backend"


@pytest.fixture(autouse=True)
def a_gpu_with_triton_and_flash(monkeypatch):
    monkeypatch.setattr(available, "has_triton", lambda: True)
    monkeypatch.setattr(backends, "_triton", lambda: "triton")
    monkeypatch.setattr("moba_train.attention.moba.moba_local._triton", lambda: "triton")
    monkeypatch.setattr(composed, "refuses", lambda *call: "")
    monkeypatch.setattr(composed, "kernel_name", lambda *call: "some kernel")
    backends._picked.cache_clear()


def q(head_dim=128, dtype=torch.bfloat16) -> SimpleNamespace:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(64, 2, head_dim))


def pick(wanted="auto", x=None, block_size=512, selected=2):
    return pick_backend(wanted, KEY, x or q(), packed([64], "cpu"), block_size=block_size, selected=selected)


def test_auto_takes_triton_and_says_so_once(caplog):
    with caplog.at_level(logging.INFO):
        assert [pick(), pick()] == ["triton", "triton"]
    assert [record.message for record in caplog.records] == [
        "attention.moba.backend: auto takes triton, which can do head dim 128 and block_size 512"
    ]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"x": q(96)}, "head dim 96, 64 or 128 needed"),
        ({"block_size": 100}, "block_size 100, a multiple of 16 from 64 to 16384 needed"),
        ({"selected": 128}, "128 selected blocks besides the own one, at most 127 supported"),
    ],
)
def test_auto_takes_flash_where_triton_cannot_and_says_why(call, reason, caplog):
    with caplog.at_level(logging.INFO):
        assert pick(**call) is composed
    assert caplog.records[0].message == (
        f"attention.moba.backend: auto takes composed, on some kernel; not triton: {reason}"
    )


def test_auto_warns_when_only_plain_pytorch_is_left_and_names_every_reason(monkeypatch):
    monkeypatch.setattr(composed, "refuses", lambda *call: "some kernel: float32")
    with pytest.warns(UserWarning, match=r"plain PyTorch.*dtype torch\.float32.*some kernel: float32"):
        assert pick(x=q(dtype=torch.float32)) is reference


def test_a_measured_rule_prefers_flash_for_long_blocks_and_many_rows(monkeypatch, caplog):
    assert pick(block_size=4096) == "triton"
    monkeypatch.setattr(backends, "_COMPOSED_PAYS_FROM", {"some kernel": 2048, "another kernel": 64})
    assert pick(block_size=4096) == "triton"
    monkeypatch.setattr(backends, "_COMPOSED_ROWS", 128)
    assert pick(block_size=1024) == "triton"
    with caplog.at_level(logging.INFO):
        assert pick(block_size=2048) is composed
    assert "faster for blocks of 2048" in caplog.records[0].message


def test_a_shard_of_queries_needs_fewer_rows_for_flash_than_a_whole_sequence(monkeypatch):
    monkeypatch.setattr(backends, "_COMPOSED_PAYS_FROM", {"some kernel": 2048})
    monkeypatch.setattr(backends, "_COMPOSED_ROWS_OF_A_SHARD", 128)
    shard = packed([256], "cpu").part(((64, 128),), None)
    assert pick_backend("auto", KEY, q(), shard, block_size=2048, selected=2) is composed
    assert pick(block_size=2048) == "triton"
    monkeypatch.setattr(backends, "_COMPOSED_ROWS_OF_A_SHARD", 129)
    assert pick_backend("auto", KEY, q(), shard, block_size=2048, selected=2) == "triton"


@pytest.mark.parametrize(
    ("wanted", "call", "reason"),
    [
        ("triton", {"x": q(96)}, "head dim 96"),
        ("composed", {}, "no such kernel"),
    ],
)
def test_a_backend_that_is_demanded_and_cannot_run_is_refused_with_the_reason(wanted, call, reason, monkeypatch):
    monkeypatch.setattr(composed, "refuses", lambda *call: "no such kernel")
    with pytest.raises(ValueError, match=rf"attention\.moba\.backend: '{wanted}' cannot run this call: {reason}"):
        pick(wanted, **call)


def test_flash_shares_the_selection_kernels_where_they_can_run():
    def pick(wanted: str, x: torch.Tensor, count: int = 2):
        return pick_selector(wanted, x, packed([1], "cpu"), block_size=64, count=count)

    assert pick("composed", q(128)) == "triton"
    assert pick("composed", q(96)) is gate
    assert pick("auto", q(128)) == "triton"
    assert pick("auto", q(128), 127) == "triton"
    assert pick("auto", q(128), 128) is gate
    assert pick("reference", q(128)) is gate
    assert pick("auto", torch.zeros(1, 1, 128)) is gate


def test_the_selection_of_flash_is_the_blocks_alone_and_of_the_shape_that_tracing_is_told():
    x = torch.zeros(9, 2, 16)
    attention, layout = build("composed", 16, block_size=4, topk=3), packed([9], "cpu")
    (selected,) = attention.select(x, attention.summarize(x, layout), layout)
    (empty,) = attention.empty_selection(x, x, layout)
    assert (empty.shape, empty.dtype) == (selected.shape, selected.dtype)


def test_the_backend_is_picked_once_for_a_layout_and_again_for_a_part_of_the_keys(monkeypatch):
    picked = []

    def watched(*arguments, **options):
        picked.append(arguments[3])
        return pick_backend(*arguments, **options)

    monkeypatch.setattr("moba_train.attention.blocks.attention.pick_backend", watched)
    layout = packed([12], "cpu")
    part = layout.part(None, ((0, 8),))
    blocks = BlockAttention(4, 0.25, "reference", KEY)
    q, kv = torch.randn(12, 2, 16), torch.randn(12, 1, 16)
    for _ in range(2):
        selection = blocks.selection(torch.zeros(2, 12, 1, dtype=torch.int32), q, layout, 1)
        out, lse = blocks.attend(q, kv, kv, layout, selection)
        blocks.attend_backward(BackwardState(out, q, kv, kv, out, lse), layout, selection)
        blocks.attend(q, kv[:8], kv[:8], part, selection)
    assert picked == [layout, part]


def test_the_reference_takes_a_selection_that_the_kernels_made(monkeypatch):
    """A rank whose queries are one range selects with `triton`, then meets keys that only the reference takes."""
    layout, options = packed([256], "cpu"), {"block_size": 64, "selected": 2}
    mine, theirs = layout.part(((96, 160),), None), layout.part(((96, 160),), ((0, 64), (96, 160)))
    assert pick_backend("auto", KEY, q(), mine, **options) == "triton"
    monkeypatch.setattr(composed, "refuses", lambda *call: "a part of the sequence")
    with pytest.warns(UserWarning, match="token ranges 0-64, 96-160 are less than block_size 64 apart"):
        assert pick_backend("auto", KEY, q(), theirs, **options) is reference
    x = torch.zeros(128, 2, 16)
    selection = tuple(torch.zeros(shape, dtype=torch.int32) for shape in ((2, 64, 2), (256,), (9,)))
    call = {"block_size": 64, "scale": 1.0}
    out, lse = reference.attend(x[:64], x, x, theirs, selection, **call)
    assert out.shape == (64, 2, 16)
    reference.attend_backward(BackwardState(out, x[:64], x, x, out, lse), theirs, selection, **call)
