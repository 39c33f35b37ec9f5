"""The kind `moa` on a GPU, in 16 bits: as near to the definition as rounding allows, and within the memory allowed."""

from typing import Any

import pytest
import torch

from tests.attention.helpers import make_qkv, triple

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moba_train.attention.engine import LOCAL_ENGINE  # noqa: E402
from moba_train.attention.full import FullAttention  # noqa: E402
from moba_train.attention.layout import packed_layout  # noqa: E402
from moba_train.mechanisms.moa.moa_kind import SpanAttention  # noqa: E402
from tests.attention.kernel_checks import error, inputs, layout_of, run  # noqa: E402

MIXED = {
    "alpha": (64, 1000, -200, 0, 130, 10, 512, 300),
    "beta": (0.0, 0.2, 0.6, 1.0, 0.0, 0.3, 0.0, 0.0),
    "max_length": 8192,
}
UNIFORM = {"alpha": 200, "beta": 0.1, "max_length": 8192}


@pytest.mark.parametrize("options", [MIXED, UNIFORM], ids=["mixed", "uniform"])
@pytest.mark.parametrize("lengths", [[3000], [1500, 0, 1, 333, 700]])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_outputs_and_gradients(options: dict[str, Any], lengths: list[int], head_dim: int) -> None:
    tensors, layout = inputs(lengths, 8, 2, head_dim, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    wide = [x.double() for x in tensors]
    kernels, exact = (
        SpanAttention(SpanAttention.Options(backend=backend, **options), head_dim) for backend in ("auto", "reference")
    )
    got, want = run(kernels, tensors, layout)[0], run(exact, wide, layout)[0]
    again = run(kernels, tensors, layout)[0]
    for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), got, want, again, strict=True):
        assert error(a, b) < 2e-2, name
        if options is UNIFORM:  # cuDNN, which may take heads with full attention, is not reproducible
            assert torch.equal(a, c), f"{name}: not deterministic"


@pytest.mark.parametrize(("lengths", "keys_times"), [([32_768, 32_768], 1.0), ([32_768], 4.0)])
def test_gradients_of_sinks_that_32k_queries_attend_to(lengths: list[int], keys_times: float) -> None:
    """The layers of F10's arm at 32K, whose training diverged; larger keys give sharper softmaxes, as trained ones."""
    options = {"alpha": 1472, "sink_tokens": 64}
    tensors = inputs(lengths, 6, 3, 64, torch.bfloat16, "cuda")
    tensors[1] *= keys_times
    kernels, exact = (
        SpanAttention(SpanAttention.Options(backend=backend, **options), 64) for backend in ("auto", "composed")
    )
    got = run(kernels, tensors, layout_of(lengths, "cuda"))[0]
    want = run(exact, [x.cpu().float() for x in tensors], layout_of(lengths, "cpu"))[0]
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert error(a.cpu(), b) < 2e-2, name
        if name != "lse":
            assert error(a[:64].cpu(), b[:64]) < 2e-2, f"{name} of the sinks"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"alpha": 2048}, {"alpha": 1000, "beta": 0.1}, {}], ids=["64", "256", "mixed"])
def test_memory_of_forward_and_backward_is_within_half_more_than_dense_attentions(
    options: dict[str, Any], head_dim: int
) -> None:
    tokens, heads, kv_heads = 131_072, 16, 4
    if not options:
        options = {"alpha": (256, 2048, 2000, 0) * 4, "beta": (0.0, 0.0, 0.125, 1.0) * 4}
    layout = packed_layout([tokens], "cuda")

    def peak(attention: Any) -> int:
        qkv = [x.detach().requires_grad_() for x in make_qkv(tokens, heads, kv_heads, head_dim, "cuda", torch.bfloat16)]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        out, _ = LOCAL_ENGINE(*triple(qkv), attention, layout)
        out.backward(torch.ones_like(out))
        return torch.cuda.max_memory_allocated()

    ours = peak(SpanAttention(SpanAttention.Options(**options), head_dim))
    assert ours < 1.5 * peak(FullAttention(FullAttention.Options(), head_dim))
