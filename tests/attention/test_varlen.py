"""Kernels for attention inside many segments: each gives what one explicit softmax per segment gives."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kernels.varlen import KERNELS, Cpu, Segments, TorchFlash, best_kernel, refusals
from moba_train.attention.kernels.varlen.kernels import _deterministic_algorithms
from moba_train.attention.kernels.varlen.protocol import VarlenKernel
from moba_train.attention.protocol import BackwardState
from tests.attention.helpers import labelled, make_qkv

ON_GPU = [kernel for kernel in KERNELS if kernel is not Cpu]
gpu_kernels = pytest.mark.parametrize("kernel", ON_GPU, ids=lambda kernel: kernel.name)

UNEVEN = [(5, 7), (0, 4), (3, 0), (0, 0), (1, 1), (9, 2)]
"""(queries, keys) of each segment: either, both or neither."""
LONG = [(300, 513), (0, 100), (70, 0), (0, 0), (1, 1), (129, 700), (2000, 64)]
SQUARE = [(5, 5), (0, 0), (1, 1), (9, 9)]
LONG_SQUARE = [(300, 300), (0, 0), (1, 1), (700, 700)]
DEEP = [(3, 7), (0, 4), (5, 5), (1, 6), (0, 0), (2, 2)]
LONG_DEEP = [(300, 513), (0, 100), (70, 70), (1, 600), (0, 0), (129, 700)]


def segments_of(lengths: Sequence[tuple[int, int]], causal: bool, device: torch.device | str = "cpu") -> Segments:
    """A bound that is not exact, as callers may give."""
    cu_q, cu_k = (torch.tensor([0, *(n[i] for n in lengths)]).cumsum(0).to(device, torch.int32) for i in range(2))
    return Segments(cu_q, cu_k, max(n[0] for n in lengths), max(n[1] for n in lengths), causal)


def inputs(
    lengths: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """q, k, v, dout."""
    queries, keys = (sum(n[i] for n in lengths) for i in range(2))
    q, dout, _ = make_qkv(queries, heads, heads, head_dim, device, dtype)
    _, k, v = make_qkv(keys, heads, kv_heads, head_dim, device, dtype, seed=1)
    return [x.detach() for x in (q, k, v, dout)]


def plainly(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by one softmax over all keys, in q's dtype, differentiable."""
    rows, keys = torch.arange(q.shape[0], device=q.device), torch.arange(k.shape[0], device=q.device)
    q_segment = torch.searchsorted(segments.cu_q[1:], rows, right=True)
    k_segment = torch.searchsorted(segments.cu_k[1:], keys, right=True)
    seen = q_segment[:, None] == k_segment[None]
    if segments.causal:
        key_of_row = segments.cu_k[1:][q_segment] - segments.cu_q[1:][q_segment] + rows  # the last of both are together
        seen &= keys[None] <= key_of_row[:, None]
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,shd->hns", q, k.repeat_interleave(group, 1)) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    return torch.einsum("hns,shd->nhd", weights, v.repeat_interleave(group, 1)), lse


def results(kernel: Any, tensors: Sequence[Tensor], segments: Segments, scale: float = 0.3) -> list[Tensor]:
    """[out, lse, dq, dk, dv]."""
    q, k, v, dout = tensors
    out, lse = kernel.forward(q, k, v, segments, scale)
    return [out, lse, *kernel.backward(BackwardState(dout, q, k, v, out, lse), segments, scale, deterministic=True)]


def exactly(tensors: Sequence[Tensor], segments: Segments, scale: float = 0.3) -> list[Tensor]:
    q, k, v, dout = (x.double().requires_grad_() for x in tensors)
    out, lse = plainly(q, k, v, segments, scale)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, (q, k, v), dout))]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize(("lengths", "causal"), [(UNEVEN, False), (SQUARE, False), (SQUARE, True), (DEEP, True)])
def test_cpu_kernel_equals_one_softmax_per_segment(
    lengths: list[tuple[int, int]], causal: bool, heads: int, kv_heads: int
) -> None:
    tensors, segments = inputs(lengths, heads, kv_heads, 16), segments_of(lengths, causal)
    for name, got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), results(Cpu, tensors, segments), exactly(tensors, segments), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-13, msg=labelled(name))


def check_against_exact(
    kernel: Any,
    lengths: Sequence[tuple[int, int]],
    causal: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Relative errors in norm below 4 units in the last place; (0, -inf) exactly where nothing is seen."""
    tensors = inputs(lengths, heads, kv_heads, head_dim, dtype, "cuda")
    if reason := kernel.refuses(tensors[0]):
        pytest.skip(reason)
    segments = segments_of(lengths, causal, "cuda")
    got, want = results(kernel, tensors, segments), exactly(tensors, segments)
    again = results(kernel, tensors, segments)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not deterministic"
    unseen = want[1] == -torch.inf
    assert torch.equal(got[1] == -torch.inf, unseen)
    assert not got[0][unseen.T].any()
    torch.testing.assert_close(got[1].double(), want[1], atol=2e-5, rtol=0)
    for name, a, b in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        # Where a query sees one key its gradient is 0, of differences of rounded numbers.
        assert (a.double() - b).norm() <= 4 * torch.finfo(dtype).eps * b.norm() + 1e-4, name


@pytest.mark.gpu
@gpu_kernels
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)]
)
@pytest.mark.parametrize(("lengths", "causal"), [(LONG, False), (LONG_SQUARE, True), (LONG_DEEP, True)])
def test_gpu_kernels_are_exact_deterministic_and_mark_rows_without_keys(
    kernel: type[VarlenKernel], lengths: list[tuple[int, int]], causal: bool, head_dim: int, dtype: torch.dtype
) -> None:
    check_against_exact(kernel, lengths, causal, 1, 1, head_dim, dtype)


@pytest.mark.gpu
@gpu_kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(
    ("lengths", "causal"), [(LONG, False), (LONG_SQUARE, True), (LONG_DEEP, True), ([(1, 1), (0, 0), (1, 1)], True)]
)
def test_gpu_kernels_with_several_heads(
    kernel: type[VarlenKernel], lengths: list[tuple[int, int]], causal: bool, heads: int, kv_heads: int
) -> None:
    check_against_exact(kernel, lengths, causal, heads, kv_heads, 128, torch.bfloat16)


def check_parts_of_gradients(kernel: Any, tensors: Sequence[Tensor], dtype: torch.dtype, atol: float) -> None:
    """Gradients of attention to all keys are the sum of those to each half, given the out and lse of the whole."""
    q, k, v, dout = tensors
    rows, keys = q.shape[0], k.shape[0]
    whole = segments_of([(rows, keys)], False, q.device)
    out, lse = kernel.forward(q, k, v, whole, 0.3)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk, dv = [], []
    for half in (slice(0, keys // 3), slice(keys // 3, keys)):
        part = segments_of([(rows, half.stop - half.start)], False, q.device)
        state = BackwardState(dout, q, k[half].clone(), v[half].clone(), out, lse)
        dq_part, dk_part, dv_part = kernel.backward(state, part, 0.3, deterministic=True)
        dq += dq_part
        dk.append(dk_part)
        dv.append(dv_part)
    grads = (dq, torch.cat(dk), torch.cat(dv))
    for name, got, want in zip(("dq", "dk", "dv"), grads, exactly(tensors, whole)[2:], strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error <= atol, f"{name}: {error:.1e}"


def test_backward_takes_out_and_lse_of_more_keys_than_it_is_given() -> None:
    check_parts_of_gradients(Cpu, inputs([(11, 30)], 2, 1, 16), torch.float64, 1e-13)


@pytest.mark.gpu
@gpu_kernels
def test_gpu_backward_takes_out_and_lse_of_more_keys_than_it_is_given(kernel: type[VarlenKernel]) -> None:
    tensors = inputs([(300, 900)], 4, 2, 128, torch.bfloat16, "cuda")
    if reason := kernel.refuses(tensors[0]):
        pytest.skip(reason)
    check_parts_of_gradients(kernel, tensors, torch.float32, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, True), (True, False)])
def test_torchs_deterministic_switch_is_on_for_the_call_only(enabled: bool, warn_only: bool) -> None:
    """Left on, it would slow or break unrelated operators; `warn_only` must not leak in, FlashAttention ignores it."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        with _deterministic_algorithms(True):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # not in its stubs
    finally:
        torch.use_deterministic_algorithms(before)


def test_the_cpu_has_a_kernel_for_every_dtype_and_the_others_say_why_not() -> None:
    q = torch.zeros(4, 1, 16)
    assert best_kernel(q) is Cpu
    assert "tensors are on cpu, not on CUDA" in TorchFlash.refuses(q)
    on_meta = refusals(q.to("meta"))
    assert best_kernel(q.to("meta")) is None
    assert all(kernel.name in on_meta for kernel in KERNELS)


@pytest.mark.gpu
def test_more_segments_than_a_kernel_takes_are_left_to_another_or_to_none(device: torch.device) -> None:
    q = torch.zeros(4, 1, 64, dtype=torch.bfloat16, device=device)
    assert best_kernel(q, 2**16 - 1) is not None
    taken = best_kernel(q, 2**16)
    assert taken is None or taken.most_segments >= 2**16
    if taken is None:
        assert "65536 segments, at most 65535 supported" in refusals(q, 2**16)
