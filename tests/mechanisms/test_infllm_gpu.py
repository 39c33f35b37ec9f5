"""InfLLM-V2 and InfLLM on a GPU: kernels against float64, memory of a long sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.kernels.common.geometry import query_blocks
from moba_train.attention.kernels.common.reference import masked_attend, selected_mask
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import TokenRange, packed_layout
from moba_train.attention.protocol import BackwardState
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.infllm_v2.infllm_v2_kind import InfLLMV2Attention
from moba_train.mechanisms.infllm_v2.scores import window_means
from tests.attention.kernel_checks import error, exact, inputs, layout_of, naive, run
from tests.attention.kind_checks import make_layer, run_layer

pytestmark = pytest.mark.gpu

LENGTHS = [9000, 0, 1, 700]
MODEL = ModelConfig(vocab_size=50, hidden_size=256, intermediate_size=48, layers=1, heads=4, kv_heads=2, head_dim=64)


HEADS = pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (4, 2, 128), (16, 1, 128)])


@HEADS
@pytest.mark.parametrize("options", [{}, {"dense_len": 1, "topk": 20, "local_blocks": 4}], ids=["paper", "sparse"])
def test_outputs_and_gradients_for_the_selected_blocks(
    heads: int, kv_heads: int, head_dim: int, options: dict[str, Any], device: torch.device
) -> None:
    tensors, layout = inputs(LENGTHS, heads, kv_heads, head_dim, torch.bfloat16, device), layout_of(LENGTHS, device)
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**options), head_dim)
    q, k, v, dout = tensors
    selection = attention.select(q, attention.summarize(k, layout), layout)
    selected = attention.blocks.selected_blocks(selection)
    assert selected is not None
    out, lse = attention.attend(q, k, v, layout, selection)
    got = [out, *attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)]
    want = exact(tensors, layout, selected, 64, attention.scale)
    plain = naive(tensors, layout, selected, 64, attention.scale)
    torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=0)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, [want[0], *want[2:]], plain, strict=True):
        assert error(a, b) <= 1.1 * error(c, b), name


def shared_blocks(got: Tensor, want: Tensor) -> float:
    """The share of the wanted blocks that were selected; [H, T, C] each, -1 for none."""
    found = [torch.zeros(*x.shape[:2], 256, device=x.device) for x in (got, want)]
    for marks, ids in zip(found, (got, want), strict=True):
        marks.scatter_(2, torch.where(ids < 0, 255, ids).long(), 1)
    both, wanted = (found[0] * found[1])[..., :255], found[1][..., :255]
    return (both.sum() / wanted.sum()).item()


def test_selected_blocks_are_nearly_those_of_float64(device: torch.device) -> None:
    q, k, *_ = inputs(LENGTHS, 4, 2, 128, torch.bfloat16, device)
    layout = layout_of(LENGTHS, device)
    options = {"dense_len": 1, "topk": 20, "local_blocks": 4}
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**options), 128)
    wide = q.double(), k.double()
    got, want = (attention.select_blocks(x, attention.summarize(y, layout), layout) for x, y in ((q, k), wide))
    assert got is not None
    assert want is not None
    assert shared_blocks(got, want) > 0.97


@HEADS
def test_scores_and_choice_of_the_kernels_equal_float64(
    heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> None:
    q, k, *_ = inputs(LENGTHS, heads, kv_heads, head_dim, torch.bfloat16, device)
    layout = layout_of(LENGTHS, device)
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(dense_len=1), head_dim)
    windows = window_means(attention.summarize(k, layout), attention.options.window // attention.options.stride)
    wide = q.double(), windows.double()
    scores = torch.full((2, kv_heads, sum(LENGTHS), 154), -1.0, device=device, dtype=torch.float64)
    for which, tensors in enumerate(((q, windows), wide)):
        for rows, blocks, found in attention.scores.chunks(*tensors, layout, kernels=which == 0):
            scores[which, :, rows, blocks] = found.double()
    sees = layout.positions(layout.q_tokens, layout.q_documents) + 1 >= attention.options.window
    seen = (scores >= 0).all(0) & sees[None, :, None]
    assert (scores[0][seen] > 0).float().mean() > 0.3
    torch.testing.assert_close(scores[0][seen], scores[1][seen], rtol=2e-3, atol=1e-5)
    queries = query_blocks(layout, 64)
    rounded = scores[0].float().clamp(min=0)
    got = choose_blocks(rounded, queries, 20, first=1, local=4)
    assert torch.equal(got, choose_blocks(rounded.double(), queries, 20, first=1, local=4))


def test_gradients_are_reproducible(device: torch.device) -> None:
    tensors, layout = inputs([12000], 8, 2, 64, torch.bfloat16, device), layout_of([12000], device)
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(topk=60, dense_len=3000), 64)
    first, selection = run(attention, tensors, layout)
    again, _ = run(attention, tensors, layout, selection)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dense_len", [1, 4096])
def test_decoding_attends_to_the_selected_blocks(dense_len: int, device: torch.device) -> None:
    """Outputs against float64 for the same blocks: of two with nearly the same score, float64 may take the other."""
    lengths = [9000, 1, 700, 5000]
    _, k, v, _ = inputs(lengths, 8, 2, 128, torch.bfloat16, device)
    layout = last_tokens(lengths, device)
    q = torch.randn(4, 8, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(dense_len=dense_len, topk=20, local_blocks=4), 128)
    summaries = attention.summarize(k, layout.part(None, None))
    ranges = tuple(TokenRange(stop - length, stop) for length, stop in zip(lengths, layout.edges[1:], strict=True))
    out, lse = attention.decode(q, CachedKeys(k, v, ranges, layout, summaries))
    selected = attention.select_blocks(q, summaries, layout)
    best = attention.select_blocks(q.double(), attention.summarize(k.double(), layout.part(None, None)), layout)
    assert selected is not None
    assert best is not None
    assert shared_blocks(selected, best) > 0.97
    mask = selected_mask(selected, layout, 64)
    want_out, want_lse = masked_attend(q.double(), k.double(), v.double(), mask, attention.scale, prefix=False)
    assert error(out, want_out) < 5e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)


def test_memory_of_a_long_sequence(device: torch.device) -> None:
    """32K tokens, forward and backward: 1.5 times q, k, v, output, their gradients and what dense attention adds."""
    tensors = inputs([32768], 32, 8, 128, torch.bfloat16, device)
    layout = packed_layout([32768], device)
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(), 128)

    def peak(attention: InfLLMV2Attention) -> int:
        q, k, v, dout = tensors
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        selection = attention.select(q, attention.summarize(k, layout), layout)
        out, lse = attention.attend(q, k, v, layout, selection)
        attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)
        return torch.cuda.max_memory_allocated()

    dense = InfLLMV2Attention(InfLLMV2Attention.Options(dense_len=32768), 128)
    assert dense.select(tensors[0], dense.summarize(tensors[1], layout), layout) == ()
    assert peak(attention) < 1.5 * peak(dense)


@torch.no_grad()
def test_memory_of_infllm_beside_dense_attention(device: torch.device) -> None:
    """A forward pass of 32K tokens: at most 1.5 times what full attention takes forward and backward."""
    model = MODEL.model_copy(update={"hidden_size": 2048, "heads": 32, "kv_heads": 8})
    layer = make_layer("infllm", {}, [256], model=model)
    shapes = [(32768, *x.shape[1:]) for x in layer.inputs()]
    on_device = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]

    def peak(kind: AttentionKind) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run_layer(layer.with_inputs(on_device, kind=kind, layout=packed_layout([32768], device)))
        return torch.cuda.max_memory_allocated()

    full = make_layer("full", {}, [256], model=model).kind
    gradients = sum(x.numel() * 2 for x in on_device[1:]) + 2 * 32768 * 32 * 64 * 2  # and the output's, and delta
    assert peak(layer.kind) < 1.5 * (peak(full) + gradients)


@torch.no_grad()
def test_infllm_equals_its_float64_on_the_cpu(device: torch.device) -> None:
    options = {"window": 512, "block_size": 64, "topk": 4, "representatives": 4}
    layer = make_layer("infllm", options, [3000, 0, 1, 400], model=MODEL)
    rounded = [x.to(torch.bfloat16) for x in layer.inputs()]
    (want,) = run_layer(layer.with_inputs(x.double() for x in rounded))
    on_device = layer.with_inputs((x.to(device) for x in rounded), layout=layout_of([3000, 0, 1, 400], device))
    (got,) = run_layer(on_device)
    off = (got.cpu().double() - want).abs().amax((1, 2)) > 0.05
    assert off.double().mean() < 0.1  # some queries select another block in 16 bits
