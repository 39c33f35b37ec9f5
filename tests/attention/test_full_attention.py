"""Full attention: all backends give equal results."""

from collections.abc import Sequence

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.full.kernels import BACKENDS
from moba_train.attention.kernels.common import reference
from moba_train.attention.layout import packed_layout
from moba_train.attention.protocol import LocalAttention
from moba_train.run.determinism import deterministic
from tests.attention.helpers import assert_all_close, make_qkv, run
from tests.attention.oracle import full as oracle_full

PACKED = [9, 0, 1, 21]


@pytest.mark.parametrize("lengths", [[31], PACKED])
def test_attention_by_blocks_equals_the_specification(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moba_train.attention.full.full_kind._BLOCK", 4)
    monkeypatch.setattr(FullAttention, "fixed_order_by_blocks", lambda *_: True)
    qkv = make_qkv(31, 4, 2, 16)
    assert_all_close(results("auto", qkv, lengths), run(lambda q, k, v: oracle_full(q, k, v, lengths), qkv))


def test_blocks_are_attended_to_where_they_are_faster_than_flash_in_a_fixed_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("moba_train.attention.kernels.table.interpreted", lambda: True)
    monkeypatch.setattr(FullAttention, "pick", lambda *_: BACKENDS["flash"])

    def by_blocks(lengths: list[int], head_dim: int = 128, backend: str = "auto") -> bool:
        attention = FullAttention(FullAttention.Options(backend=backend), head_dim)
        return attention.fixed_order_by_blocks(torch.empty(sum(lengths), 1, head_dim), packed_layout(lengths))

    assert not by_blocks([8192]), "without deterministic: true"
    with deterministic(True):
        assert by_blocks([8192])
        assert not by_blocks([8191])
        assert not by_blocks([8192, 8192])
        assert not by_blocks([8192], head_dim=80)
        assert not by_blocks([8192], backend="flash")
        assert not by_blocks([2**19 + 1]), "more blocks than kernels select"
        monkeypatch.setattr(FullAttention, "pick", lambda *_: BACKENDS["flash4"])
        assert not by_blocks([8192])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 9000])
def test_a_fixed_order_by_blocks_on_a_gpu(tokens: int) -> None:
    """Bit for bit again, and as near to float32 as FlashAttention-2's."""
    q, k, v = make_qkv(tokens, 8, 2, 128, "cuda", torch.bfloat16)
    layout = packed_layout([tokens], "cuda")
    attention, flash = (FullAttention(FullAttention.Options(backend=name), 128) for name in ("auto", "flash"))

    def computed(attention: LocalAttention) -> tuple[torch.Tensor, ...]:
        out, lse = LOCAL_ENGINE(q, k, v, attention, layout)
        return out.detach(), lse, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    want = computed(flash)
    with deterministic(True):
        flash4 = attention.pick(q, layout) is BACKENDS["flash4"]  # where that package is installed
        assert attention.fixed_order_by_blocks(q, layout) != flash4
        got, again = computed(attention), computed(attention)
    for ours, same, theirs in zip(got, again, want, strict=True):
        assert torch.equal(ours, same)
        assert (ours - theirs).float().norm() < 0.01 * theirs.float().norm()


def results(backend: str, qkv: Sequence[torch.Tensor], lengths: list[int]) -> list[torch.Tensor]:
    attention = FullAttention(FullAttention.Options(backend=backend), qkv[0].shape[-1])
    layout = packed_layout(lengths, qkv[0].device)
    return run(lambda q, k, v: LOCAL_ENGINE(q, k, v, attention, layout), qkv)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", [[31], PACKED])
def test_float64_results_and_gradients_equal_the_specification(
    backend: str, heads: int, kv_heads: int, lengths: list[int]
) -> None:
    qkv = make_qkv(31, heads, kv_heads, 16)
    assert_all_close(results(backend, qkv, lengths), run(lambda q, k, v: oracle_full(q, k, v, lengths), qkv))


def test_auto_equals_the_specification_on_this_device(device: torch.device) -> None:
    qkv = make_qkv(31, 4, 2, 16)
    got = results("auto", tuple(x.to(device) for x in qkv), PACKED)
    assert_all_close(got, run(lambda q, k, v: oracle_full(q, k, v, PACKED), qkv))


def test_reference_gives_the_same_when_it_works_in_chunks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    qkv = make_qkv(50, 2, 1, 16, device)
    want = results("reference", qkv, [30, 20])
    monkeypatch.setattr(reference, "_SCORES_PER_CHUNK", {"cpu": 1, "cuda": 1})
    assert_all_close(results("reference", qkv, [30, 20]), want)


def assert_within_rounding(backend: str, qkv: Sequence[torch.Tensor], lengths: list[int]) -> None:
    """At most three times the reference's own error; the fused kernels' exp is good to 1e-5 in 16 bit."""
    slack = 1e-6 if qkv[0].dtype == torch.float32 else 1e-5
    exact = results("reference", tuple(x.double() for x in qkv), lengths)
    plain = results("reference", qkv, lengths)
    for truth, ours, theirs in zip(exact, plain, results(backend, qkv, lengths), strict=True):
        assert ours.dtype == theirs.dtype
        error, allowed = ((x.double() - truth).norm() for x in (theirs, ours))
        assert error <= 3 * allowed + slack * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa_is_as_exact_as_the_reference_in_lower_precision(dtype: torch.dtype) -> None:
    assert_within_rounding("sdpa", make_qkv(150, 4, 2, 64, dtype=dtype), [70, 0, 80])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", ["flash", "flash2", "flash4"])
def test_flash_is_as_exact_as_the_reference(
    backend: str, dtype: torch.dtype, head_dim: int, kv_heads: int, device: torch.device
) -> None:
    qkv = make_qkv(400, 4, kv_heads, head_dim, device, dtype)
    if reason := BACKENDS[backend].refuses(qkv[0]):
        pytest.skip(reason)
    assert_within_rounding(backend, qkv, [150, 0, 1, 249])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [[400], [200, 200]])
def test_cudnn_is_as_exact_as_the_reference(
    dtype: torch.dtype, head_dim: int, kv_heads: int, lengths: list[int], device: torch.device
) -> None:
    assert_within_rounding("cudnn", make_qkv(400, 4, kv_heads, head_dim, device, dtype), lengths)


@pytest.mark.gpu
def test_cudnn_refuses_documents_of_different_lengths(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"attention\.full\.backend: 'cudnn' cannot run"):
        results("cudnn", make_qkv(400, 4, 2, 64, device, torch.bfloat16), [150, 250])


@pytest.mark.gpu
def test_auto_takes_flash_for_whole_sequences_in_16_bit(device: torch.device) -> None:
    qkv = make_qkv(64, 4, 2, 64, device, torch.bfloat16)
    torch.testing.assert_close(results("auto", qkv, [64]), results("flash", qkv, [64]), rtol=1e-2, atol=1e-2)


def test_a_forced_backend_that_cannot_run_is_refused_with_what_can() -> None:
    qkv = make_qkv(8, 2, 1, 16)
    with pytest.raises(ValueError, match=r"attention\.full\.backend: 'flash' cannot run .*float64 on cpu.*reference"):
        results("flash", qkv, [8])
