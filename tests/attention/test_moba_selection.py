"""Which blocks a query attends to. In 16-bit dtypes near-ties may flip, so there the selection is checked as a
selection, and the attention with that selection held fixed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.gate import gate_scores, pool_keys
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import BackwardState
from tests.attention import oracle
from tests.attention.helpers import make_qkv, ranges, triple


def selected_by(q: Tensor, k: Tensor, lengths: list[int], **options: Any) -> Tensor:
    attention = MobaAttention(MobaAttention.Options(backend="reference", **options), q.shape[-1])
    layout = packed_layout(lengths, q.device)
    return attention.select(q, attention.summarize(k, layout), layout)[0]


def as_lists(selected_HTC: Tensor) -> oracle.Selection:
    return [[[block for block in row if block >= 0] for row in head] for head in selected_HTC.tolist()]


def rank_one(
    gates: list[float], block_size: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """q [T, 1, 8] and k of one document in which every query's gate of block i is exactly gates[i]."""
    q = torch.zeros(len(gates) * block_size, 1, 8, dtype=dtype, device=device)
    q[..., 0] = 1
    k = torch.zeros_like(q)
    k[:, 0, 0] = torch.tensor(gates, dtype=dtype, device=device).repeat_interleave(block_size)
    return q, k


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("always", [("current",), ("current", "previous"), ("current", "previous", "first")])
def test_the_selected_blocks_are_the_specified_ones(select: str, always: tuple[str, ...], device: torch.device) -> None:
    lengths = [37, 0, 3, 22]
    q, k, _ = make_qkv(62, 4, 2, 16, device)
    options: dict[str, Any] = {"block_size": 4, "topk": 4, "select": select, "always": always}
    assert as_lists(selected_by(q, k, lengths, **options)) == oracle.select_blocks(q.cpu(), k.cpu(), lengths, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_of_equal_gates_the_lower_block_wins(dtype: torch.dtype, device: torch.device) -> None:
    q, k = rank_one([1, 2, 1, 2, 1, 2, 0, 0], 4, device, dtype)
    assert as_lists(selected_by(q, k, [32], block_size=4, topk=3))[0][31] == [1, 3]
    assert as_lists(selected_by(q, k, [32], block_size=4, topk=5))[0][31] == [0, 1, 3, 5]
    flat_q, flat_k = rank_one([0] * 40, 2, device, dtype)
    assert as_lists(selected_by(flat_q, flat_k, [80], block_size=2, topk=4))[0][79] == [0, 1, 2]


@pytest.mark.parametrize("gate", [float("-inf"), -3e38, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("topk", [2, 3, 10])
def test_whatever_the_gates_exactly_topk_minus_1_candidates_are_selected(
    gate: float, topk: int, device: torch.device
) -> None:
    q, k = rank_one([gate] * 5, 4, device, torch.float32)
    q[..., 1:], k[..., 1:] = 0, 1  # finite next to the overflow
    lengths = [8, 12]
    for token, row in enumerate(as_lists(selected_by(q, k, lengths, block_size=4, topk=topk))[0]):
        _, candidates = oracle.history(lengths, 4, token)
        assert len(set(row)) == min(topk - 1, len(candidates))
        assert set(row) <= set(candidates)


def test_a_forced_block_wins_over_an_infinite_gate(device: torch.device) -> None:
    q, k = rank_one([float("inf"), 0, 0, 0], 4, device, torch.float32)
    q[..., 1:], k[..., 1:] = 0, 1
    selected = as_lists(selected_by(q, k, [16], block_size=4, topk=2, always=("current", "previous")))
    assert selected[0][15] == [2]


def test_own_and_future_blocks_are_never_selected_as_history(device: torch.device) -> None:
    """The gates that peek ahead are the largest by far, and still nothing but the past is taken."""
    q, k = rank_one([1, 10, 100, 1000, 10000], 4, device)
    for token, row in enumerate(as_lists(selected_by(q, k, [20], block_size=4, topk=3))[0]):
        own = token // 4
        assert row == list(range(max(0, own - 2), own))


def test_group_makes_one_selection_for_all_heads_of_a_key_head(device: torch.device) -> None:
    q, k, _ = make_qkv(40, 8, 2, 16, device)
    selected = selected_by(q, k, [40], block_size=4, topk=3, select="group")
    assert all(torch.equal(selected[0], selected[head]) for head in range(4))
    assert all(torch.equal(selected[4], selected[head]) for head in range(4, 8))
    assert not torch.equal(selected[0], selected[4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_block_means_are_summed_in_token_order_in_float32_and_rounded_to_the_keys_dtype(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Bit for bit, the short last block included; tensor-parallel and context-parallel ranks rely on it."""
    lengths = [50, 0, 7, 16]
    _, k, _ = make_qkv(73, 2, 2, 16, device, dtype)
    pooled = pool_keys(k, packed_layout(lengths, device), 16)
    means = torch.stack(oracle.block_means(k.detach(), lengths, 16))
    assert pooled.dtype == dtype
    assert not pooled.requires_grad
    assert torch.equal(pooled[: len(means)], means)


def test_gates_are_not_scaled_and_accumulate_in_float32(device: torch.device) -> None:
    """1 + 2**-10 is lost in a bfloat16 sum and kept in a float32 one."""
    q = torch.ones(1, 1, 64, dtype=torch.bfloat16, device=device)
    pooled = torch.full((1, 1, 64), 2.0**-10, dtype=torch.bfloat16, device=device)
    pooled[0, 0, 0] = 1.0
    assert gate_scores(q, pooled, "head").item() == 1 + 63 * 2.0**-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 13])
def test_a_query_selects_alike_whatever_others_are_selected_for(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """As when a sequence is cut over ranks. All blocks fit equally well, but for the order of the sum: their keys hold
    the same numbers in another order, and a query is the same in every dimension."""
    tokens, head_dim = 37, 8
    attention = MobaAttention(MobaAttention.Options(backend="reference", block_size=4, topk=3), head_dim)
    layout = packed_layout([tokens], device)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(head_dim, generator=generator)
    blocks = attention.summarize(torch.zeros(tokens, 2, head_dim, device=device), layout).shape[0]
    pooled = values[torch.rand(blocks, 2, head_dim, generator=generator).argsort(-1)].to(device, dtype)
    q = torch.rand(tokens, 4, 1, generator=generator).expand(-1, -1, head_dim).to(device, dtype)

    def selected(start: int, stop: int) -> Tensor:
        return attention.select(q[start:stop], pooled, layout.part(ranges((start, stop)), None))[0]

    together = selected(0, tokens)
    for start in range(0, tokens - rows + 1, rows):
        assert torch.equal(selected(start, start + rows), together[:, start : start + rows]), start


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_bf16_selection_is_a_valid_topk_of_the_float64_gates(
    select: str, head_dim: int, device: torch.device
) -> None:
    """Margin: d products, exact in float32, summed with a relative error below d * 2**-24 each."""
    lengths, block_size, topk = [90, 6, 64], 8, 4
    q, k, _ = (x.detach() for x in make_qkv(160, 4, 2, head_dim, device, torch.bfloat16))
    selected = as_lists(selected_by(q, k, lengths, block_size=block_size, topk=topk, select=select))
    q, k = q.cpu(), k.cpu()
    means = torch.stack(oracle.block_means(k, lengths, block_size)).double().repeat_interleave(2, dim=1)
    gates = torch.einsum("thd,nhd->htn", q.double(), means)
    margins = head_dim * 2.0**-23 * torch.einsum("thd,nhd->htn", q.double().abs(), means.abs())
    if select == "group":
        gates, margins = (x.view(2, 2, *x.shape[1:]).sum(1).repeat_interleave(2, dim=0) for x in (gates, margins))
    for token in range(160):
        _, candidates = oracle.history(lengths, block_size, token)
        for head in range(4):
            row, gate = selected[head][token], gates[head, token]
            assert len(row) == min(topk - 1, len(candidates))
            assert set(row) <= set(candidates)
            left = [block for block in candidates if block not in row]
            if row and left:
                margin = 2 * margins[head, token, candidates].max()
                assert gate[row].min() >= gate[left].max() - margin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1)])
def test_with_the_selection_held_fixed_16_bit_outputs_and_gradients_are_right_to_rounding(
    dtype: torch.dtype, heads: int, kv_heads: int, device: torch.device
) -> None:
    """Relative error of each result, in norm, below 4 units in the last place of the dtype."""
    lengths = [40, 3, 17]
    q, k, v = (x.detach() for x in make_qkv(60, heads, kv_heads, 64, device, dtype))
    attention = MobaAttention(MobaAttention.Options(block_size=8, topk=3), 64)
    layout = packed_layout(lengths, device)
    selection = attention.select(q, attention.summarize(k, layout), layout)
    out, lse = attention.attend(q, k, v, layout, selection)
    dout = make_qkv(60, heads, kv_heads, 64, device, dtype, seed=5)[0].detach()
    grads = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)

    wide = triple(x.double().cpu().requires_grad_() for x in (q, k, v))
    want, want_lse = oracle.attend(*wide, lengths, as_lists(selection[0]), block_size=8, scale=64**-0.5)
    want_grads = torch.autograd.grad(want, wide, dout.double().cpu())
    for name, got, truth in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *want_grads), strict=True):
        assert got.dtype == dtype
        error = (got.double().cpu() - truth).norm() / truth.norm()
        assert error < 4 * torch.finfo(dtype).eps, name
    torch.testing.assert_close(lse.double().cpu(), want_lse.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("keys", ["None", "whole", "own document"])
def test_decoding_one_query_against_the_cache_equals_the_last_row_of_the_full_call(
    select: str, keys: str, device: torch.device
) -> None:
    """The query comes alone; keys and pooled keys come from the cache."""
    lengths = [13, 26]
    q, k, v = (x.detach() for x in make_qkv(39, 4, 2, 16, device))
    options = MobaAttention.Options(block_size=4, topk=3, select=select)
    attention = MobaAttention(options, 16)
    whole = packed_layout(lengths, device)
    pooled = attention.summarize(k, whole)
    selection = attention.select(q, pooled, whole)
    out, lse = attention.attend(q, k, v, whole, selection)

    first = 13 if keys == "own document" else 0
    k_ranges = None if keys == "None" else ranges((first, 39))
    last = Layout(whole.cu_seqlens, whole.max_seqlen, whole.total, ranges((38, 39)), k_ranges)
    step_plan = attention.select(q[-1:], pooled, last)
    step_out, step_lse = attention.attend(q[-1:], k[first:], v[first:], last, step_plan)
    assert torch.equal(step_plan[0], selection[0][:, -1:])
    torch.testing.assert_close((step_out, step_lse), (out[-1:], lse[:, -1:]), rtol=0, atol=1e-13)


def test_growing_a_document_token_by_token_gives_the_rows_of_the_full_call(device: torch.device) -> None:
    """A pooled-key cache that is recomputed as the last block fills never changes a selection: history is complete."""
    q, k, v = (x.detach() for x in make_qkv(18, 2, 1, 16, device))
    attention = MobaAttention(MobaAttention.Options(block_size=4, topk=3), 16)
    whole = packed_layout([18], device)
    out, lse = attention.attend(q, k, v, whole, attention.select(q, attention.summarize(k, whole), whole))
    outs, lses = [], []
    for length in range(1, 19):
        cached = packed_layout([length], device)
        step = Layout(cached.cu_seqlens, length, length, ranges((length - 1, length)))
        selection = attention.select(q[length - 1 : length], attention.summarize(k[:length], cached), step)
        row_out, row_lse = attention.attend(q[length - 1 : length], k[:length], v[:length], step, selection)
        outs.append(row_out)
        lses.append(row_lse)
    torch.testing.assert_close((torch.cat(outs), torch.cat(lses, 1)), (out, lse), rtol=0, atol=1e-13)
