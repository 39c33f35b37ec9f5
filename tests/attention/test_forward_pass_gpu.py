"""The forward pass of long blocks by warps that have roles, on a Hopper GPU."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention
from tests.attention.helpers import make_qkv, only
from tests.noting import noting

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_in_gluon")]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moba_train.attention.layout import TokenRange  # noqa: E402
from moba_train.attention.moba import moba_attention  # noqa: E402
from tests.attention.kernel_checks import build, error, exact, inputs, layout_of, naive  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def kernels_in_gluon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that does not launch them fails."""
    if torch.cuda.get_device_capability() != (9, 0) or not triton.__version__.startswith("3.6."):
        pytest.skip("needs a Hopper GPU and Triton 3.6")
    from moba_train.attention.kernels.hopper.blocks_from_512_forward import SpecialisedForward  # needs Gluon

    launched = []
    plain = SpecialisedForward.diagonal
    monkeypatch.setattr(SpecialisedForward, "diagonal", noting(lambda *_: launched.append(True), plain))
    yield
    assert launched


def attend(
    attention: LocalAttention, tensors: Sequence[torch.Tensor], layout: Layout, selection: Any = None
) -> tuple[tuple[torch.Tensor, torch.Tensor], Any]:
    """(out, lse) and the selection."""
    q, k, v, _ = tensors
    selection = selection or attention.select(q, attention.summarize(k, layout), layout)
    return attention.attend(q, k, v, layout, selection), selection


CASES = {
    "512-3": ([3000], 8, 2, BF16, {"block_size": 512, "topk": 3}),
    "512-9-documents": ([2049, 513, 0, 1, 3000], 8, 2, BF16, {"block_size": 512, "topk": 9}),
    "512-9-fp16": ([5000, 700, 65], 16, 8, FP16, {"block_size": 512, "topk": 9}),
    "512-1-no-history": ([2000, 77], 4, 2, BF16, {"block_size": 512, "topk": 1}),
    "640-2-no-groups": ([2600, 1300], 8, 8, FP16, {"block_size": 640, "topk": 2}),
    "1024-3": ([4500, 513], 8, 2, BF16, {"block_size": 1024, "topk": 3}),
    "2048-2-groups-of-6": ([7000, 3], 6, 1, BF16, {"block_size": 2048, "topk": 2}),
    "4096-2": ([9000], 8, 2, FP16, {"block_size": 4096, "topk": 2}),
    "4096-12-one-block": ([100, 0, 20], 8, 2, BF16, {"block_size": 4096, "topk": 12}),
}


@pytest.mark.parametrize("topk", [2, 8])
def test_blocks_of_one_tile_of_keys(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default: benchmarks.attention_forward compares both paths."""
    from moba_train.attention.kernels.common.call import BlockCall

    monkeypatch.setattr(BlockCall, "forward_pass", "hopper/blocks_from_512_forward.py")
    lengths, options = [3001, 127, 0, 128, 900], {"block_size": 128, "topk": topk}
    test_outputs_are_as_near_to_float64_as_attention_written_plainly_and_repeat((lengths, 8, 2, BF16, options))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_are_as_near_to_float64_as_attention_written_plainly_and_repeat(
    case: tuple[list[int], int, int, torch.dtype, dict[str, int]],
) -> None:
    lengths, heads, kv_heads, dtype, options = case
    tensors, layout = inputs(lengths, heads, kv_heads, 128, dtype, "cuda"), layout_of(lengths, "cuda")
    ours = build("triton", 128, **options)
    (out, lse), selection = attend(ours, tensors, layout)
    want = exact(tensors, layout, selection[0], options["block_size"], ours.scale)
    plain = naive(tensors, layout, selection[0], options["block_size"], ours.scale)
    torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=0)
    assert error(out, want[0]) <= 1.1 * error(plain[0], want[0])
    for _ in range(4):  # the second time on a layout is recorded, later ones are repeated from the record
        again, _ = attend(ours, tensors, layout, selection)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_later_layers_on_a_layout_have_the_outputs_of_a_first_one() -> None:
    ours, layout = build("triton", 128, block_size=512, topk=3), layout_of([2049, 951], "cuda")
    for seed in range(4):
        tensors = inputs([3000], 8, 2, 128, BF16, "cuda", seed)
        got, want = (attend(ours, tensors, x)[0] for x in (layout, layout_of([2049, 951], "cuda")))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), seed


@pytest.mark.parametrize("block_size", [512, 1024])
@pytest.mark.parametrize("cut", [1500, 77])
def test_shards_of_queries_that_meet_all_keys_have_the_outputs_of_the_whole(cut: int, block_size: int) -> None:
    lengths = [3800, 1, 295]
    tensors, layout = inputs(lengths, 8, 2, 128, BF16, "cuda"), layout_of(lengths, "cuda")
    q, k, v, _ = tensors
    ours = build("triton", 128, block_size=block_size, topk=3)
    whole, (selected, *_) = attend(ours, tensors, layout)
    want = exact(tensors, layout, selected, block_size, ours.scale)
    for tokens in (TokenRange(0, cut), TokenRange(cut, 4096)):
        part, at = layout.part((tokens,), None), slice(*tokens)
        selection = ours.select(q[at], ours.summarize(k, layout), part)
        assert torch.equal(selection[0], selected[:, at])
        out, lse = ours.attend(q[at], k, v, part, selection)
        assert error(out, want[0][at]) <= 1.1 * error(whole[0][at], want[0][at])
        torch.testing.assert_close(lse.double(), want[1][:, at], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("block_size", "dtype"), [(512, FP16), (1024, BF16)])
def test_the_public_function_has_the_gradients_of_float64(block_size: int, dtype: torch.dtype) -> None:
    """Forward and backward by autograd, from one strided tensor of queries, keys and values."""
    lengths = [3000, 0, 1, 1099]
    qkv = make_qkv(sum(lengths), 12, 2, 128, "cuda", dtype)[0].detach()
    q, k, v = (x.requires_grad_() for x in qkv.split([8, 2, 2], dim=1))
    dout = make_qkv(sum(lengths), 8, 2, 128, "cuda", dtype, 1)[0].detach()
    layout, tensors = layout_of(lengths, "cuda"), [x.detach() for x in (q, k, v, dout)]
    options: dict[str, Any] = {"block_size": block_size, "topk": 3}
    out = only(moba_attention(q, k, v, cu_seqlens=layout.cu_seqlens, **options, backend="triton"))
    got = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    ours = build("triton", 128, **options)
    _, selection = attend(ours, tensors, layout)
    want, _, *gradients = exact(tensors, layout, selection[0], block_size, ours.scale)
    plain = naive(tensors, layout, selection[0], block_size, ours.scale)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, (want, *gradients), plain, strict=True):
        assert error(a, b) <= 1.1 * error(c, b), name


def test_results_repeat_bit_by_bit_beside_other_work() -> None:
    """Another stream's products make some programs late: no role may overwrite what another one still reads."""
    lengths = [3000, 0, 1, 5191]
    tensors, layout = inputs(lengths, 8, 2, 128, BF16, "cuda"), layout_of(lengths, "cuda")
    ours = build("triton", 128, block_size=512, topk=5)
    want, selection = attend(ours, tensors, layout)
    differs = torch.zeros(2, dtype=torch.int64, device="cuda")
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    end = time.monotonic() + 4
    while time.monotonic() < end:
        with torch.cuda.stream(stream):
            for _ in range(20):
                noise @ noise
        for _ in range(50):
            got, _ = attend(ours, tensors, layout, selection)
            differs += torch.stack([(a != b).any() for a, b in zip(got, want, strict=True)])
        torch.cuda.synchronize()
    assert differs.tolist() == [0, 0], "how often out and lse differed"
