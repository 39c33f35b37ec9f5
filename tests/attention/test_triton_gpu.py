"""The Triton kernels on a GPU, in 16 bits: no worse than attention as one would write it in that dtype."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from tests.attention.helpers import make_qkv, only, ranges

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moba_train.attention.kernels.common import call  # noqa: E402
from moba_train.attention.kernels.common.geometry import block_bound  # noqa: E402
from moba_train.attention.layout import Layout  # noqa: E402
from moba_train.attention.moba import moba_attention  # noqa: E402
from moba_train.attention.moba.gate import gate_scores, pool_keys  # noqa: E402
from moba_train.attention.protocol import BackwardState  # noqa: E402
from tests.attention.kernel_checks import (  # noqa: E402
    PACKED,
    build,
    check_lists,
    error,
    exact,
    inputs,
    layout_of,
    naive,
    run,
    run_in_parts,
)

LONG = [1500, 0, 1, 333, 0, 700, 128]


def case(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> "pytest.ParameterSet":
    return pytest.param(lengths, heads, kv_heads, head_dim, dtype, options)


CASES = [
    case(PACKED, 4, 2, 64, block_size=64, topk=3),
    case(PACKED, 4, 2, 128, torch.float16, block_size=64, topk=9),
    case(LONG, 8, 2, 128, block_size=128, topk=8),
    case(LONG, 8, 8, 128, block_size=128, topk=4),
    case(LONG, 8, 1, 64, block_size=128, topk=1),
    case(LONG, 6, 2, 64, block_size=80, topk=5, always=("current", "previous", "first")),
    case(LONG, 8, 2, 128, block_size=128, topk=5, select="group"),
    case(LONG, 2, 1, 64, block_size=64, topk=24),
    case([3000], 4, 2, 128, block_size=512, topk=3),
    case([3000, 1100], 4, 1, 64, torch.float16, block_size=512, topk=3),
    case([4500], 2, 2, 128, block_size=1040, topk=3),
    case([2049, 513, 0, 1, 9000], 8, 2, 128, block_size=512, topk=9),
    case([100, 20], 4, 2, 128, block_size=16384, topk=12),
    case([0, 0], 4, 2, 128, block_size=128, topk=3),
    # One pass on Hopper; in the first two for the own blocks, too, nearly one for each multiprocessor.
    case([2600, 1, 1300, 0, 700], 12, 6, 128, block_size=256, topk=4),
    case([5000, 700, 65], 16, 8, 128, torch.float16, block_size=512, topk=9),
    case([2600, 1300], 8, 8, 128, torch.float16, block_size=256, topk=2),
    case([4500, 513], 8, 2, 128, block_size=1024, topk=3),
    case([7000, 3], 6, 1, 128, block_size=2048, topk=3),
    case([9000, 700], 4, 2, 128, block_size=4096, topk=2),
]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"), CASES)
def test_outputs_and_gradients_for_the_kernels_own_selection(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cuda"), layout_of(lengths, "cuda")
    ours = build("triton", head_dim, **options)
    got, (selected, slots, starts) = run(ours, tensors, layout)
    again, selection = run(ours, tensors, layout)
    assert all(torch.equal(a, b) for a, b in zip([*got, selected], [*again, selection[0]], strict=True)), (
        "not deterministic"
    )
    if not selected.numel() and not sum(lengths):
        return
    if selected.numel():
        check_lists(selected, slots, starts, kv_heads, block_bound(layout, options["block_size"]))
    want = exact(tensors, layout, selected, options["block_size"], ours.scale)
    plain = naive(tensors, layout, selected, options["block_size"], ours.scale)
    torch.testing.assert_close(got[1].double(), want[1], atol=2e-5, rtol=0)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:]), (want[0], *want[2:]), plain, strict=True):
        assert error(a, b) <= 1.1 * error(c, b), f"{name}: {error(a, b):.2e}, written plainly {error(c, b):.2e}"


@pytest.mark.parametrize("given", [CASES[number].values for number in (1, 2, 7, 11)])
def test_queries_of_a_head_in_several_ranges(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a head's partial results are too large for all its queries at once."""
    monkeypatch.setattr(call.BlockCall, "limit", sum(given[0]))
    test_outputs_and_gradients_for_the_kernels_own_selection(*given)


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"), CASES[:4] + CASES[8:10])
def test_later_layers_on_a_layout_give_the_bits_of_a_first_one(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Their launches are repeated from a record (launch.py): for other tensors, aligned or not."""
    ours, layout = build("triton", head_dim, **options), layout_of(lengths, "cuda")
    for seed in range(4):
        tensors = inputs(lengths, heads, kv_heads, head_dim, dtype, "cuda", seed)
        want, _ = run(ours, tensors, layout_of(lengths, "cuda"))
        for moved in (None, *range(4)) if seed == 3 else (None,):
            some = [misaligned(x) if i == moved else x for i, x in enumerate(tensors)]
            for _ in range(3 if seed == 3 else 1):
                got, _ = run(ours, some, layout)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (seed, moved)


def test_later_layers_follow_the_current_stream() -> None:
    """Else their launches would not wait for the inputs, which come late here."""
    ours, lengths = build("triton", 128, block_size=512, topk=3), [3000]
    layout, stream = layout_of(lengths, "cuda"), torch.cuda.Stream()
    given = [inputs(lengths, 4, 2, 128, torch.bfloat16, "cuda", seed) for seed in range(2)]
    wanted = [run(ours, tensors, layout)[0] for tensors in given]
    tensors = [torch.zeros_like(x) for x in given[0]]
    torch.cuda.synchronize()
    for _ in range(3):
        for some, want in zip(given, wanted, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**7)
                for x, y in zip(tensors, some, strict=True):
                    x.copy_(y)
                got, _ = run(ours, tensors, layout)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """A copy whose address is no multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


MORE: tuple[dict[str, Any], ...] = ({}, {"always": ("current", "first", "previous"), "select": "group"})
MANY_BLOCKS = [
    case([20000, 3000, 7], 2, 1, 128, block_size=64, topk=topk, **more)
    for topk in (4, 8, 17, 24, 65, 128)
    for more in MORE
]


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"), CASES + MANY_BLOCKS)
def test_the_selection_is_a_valid_topk(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Block means are the reference's bit for bit; gates differ from float64 by rounding of the sums alone."""
    (q, k, *_), layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cuda"), layout_of(lengths, "cuda")
    ours, reference = (build(kind, head_dim, **options) for kind in ("triton", "reference"))
    pooled = ours.summarize(k, layout)
    assert torch.equal(pooled, pool_keys(k, layout, options["block_size"]))
    selected, want = ours.select(q, pooled, layout)[0].long(), reference.select(q, pooled, layout)[0].long()
    assert selected.shape == want.shape
    assert torch.equal(selected >= 0, want >= 0)
    if not selected.numel():
        return
    select = options.get("select", "head")
    gates = gate_scores(q.double(), pooled.double(), select)
    gates = gates.repeat_interleave(heads // gates.shape[0], dim=0)
    margin = head_dim * 2.0**-22 * gate_scores(q.double().abs(), pooled.double().abs(), select).max()
    chunk_bits = ((gates.shape[2] + 63) // 64 - 1).bit_length()  # of a gate, that the number of its chunk replaces
    margin += 2.0 ** (chunk_bits - 23) * gates.abs().max() if chunk_bits else 0
    # Where the two selections differ, the gates that were exchanged are equal within rounding.
    sums = [gates.gather(2, x.clamp(min=0)).masked_fill(x < 0, 0).sort(-1).values for x in (selected, want)]
    assert (sums[0] - sums[1]).abs().max() <= margin
    assert (selected != want).float().mean() < 1e-3


@pytest.mark.parametrize(("block_size", "topk"), [(128, 4), (512, 3), (1040, 2)])
def test_shards_of_queries_and_keys_give_the_whole(block_size: int, topk: int) -> None:
    """As a ring computes it: an equal selection, and results that differ from those of one call by rounding."""
    lengths = [2900, 0, 1, 1195]
    tensors, layout = inputs(lengths, 4, 2, 128, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    ours = build("triton", 128, block_size=block_size, topk=topk)
    want, (selected, *_) = run(ours, tensors, layout)
    true = exact(tensors, layout, selected, block_size, ours.scale)
    for shards in (
        [ranges((0, 1500)), ranges((1500, 4096))],
        [ranges((0, 700), (3000, 4096)), ranges((700, 3000))],
    ):
        got, parts_selected = run_in_parts(ours, tensors, layout, shards)
        assert torch.equal(parts_selected, selected)
        for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), got, true, want, strict=True):
            assert error(a, b) <= 1.5 * error(c, b) + 1e-4, name


@pytest.mark.parametrize(("block_size", "topk"), [(128, 4), (256, 5), (512, 3)])
def test_gradients_of_shards_repeat_bit_by_bit(block_size: int, topk: int) -> None:
    """Also for keys whose own block has no query here: loads that are not waited for must not overwrite results."""
    lengths = [2900, 0, 1, 1195]
    (q, k, v, dout), layout = inputs(lengths, 4, 2, 128, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    ours = build("triton", 128, block_size=block_size, topk=topk)
    (out, lse, *_), _ = run(ours, [q, k, v, dout], layout)
    here, there = ranges((0, 700), (3000, 4096)), ranges((700, 3000))
    part = Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, here, there)
    at, keys = (Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, x).q_tokens for x in (here, there))
    selection = ours.select(
        q[at], ours.summarize(k, layout), Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, here)
    )
    state = BackwardState(dout[at], q[at], k[keys], v[keys], out[at], lse[:, at].contiguous())
    want, noise = None, torch.empty(2**22, device="cuda")
    for _ in range(20):
        noise.normal_()  # other work before, and other contents of what is allocated
        got = ours.attend_backward(state, part, selection)
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("cut", "block_size"), [(1500, 256), (640, 256), (77, 256)])
def test_shards_of_queries_that_meet_all_keys_have_the_gradients_of_the_whole(cut: int, block_size: int) -> None:
    """Rows that begin inside their block. On Hopper in one pass, the own blocks' too."""
    lengths = [3800, 1, 295]
    q, k, v, dout = tensors = inputs(lengths, 12, 6, 128, torch.bfloat16, "cuda")
    layout, ours = layout_of(lengths, "cuda"), build("triton", 128, block_size=block_size, topk=4)
    (out, lse, *whole), (selected, *_) = run(ours, tensors, layout)
    want = exact(tensors, layout, selected, block_size, ours.scale)[2:]
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for own in (ranges((0, cut)), ranges((cut, 4096))):
        part = Layout(layout.cu_seqlens, layout.max_seqlen, layout.total, own)
        at = part.q_tokens
        selection = ours.select(q[at], ours.summarize(k, layout), part)
        state = BackwardState(dout[at], q[at], k, v, out[at], lse[:, at].contiguous())
        grads = ours.attend_backward(state, part, selection)
        again = ours.attend_backward(state, part, selection)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
        sums[0][at] += grads[0]
        sums[1] += grads[1]
        sums[2] += grads[2]
    for name, a, b, c in zip(("dq", "dk", "dv"), sums, want, whole, strict=True):
        assert error(a, b) <= 1.5 * error(c, b) + 1e-4, name


BESIDE = "import torch; x = torch.randn(4096, 4096, device='cuda'); print('ready', flush=True)\nwhile True: x @ x"


@pytest.mark.parametrize(("block_size", "topk"), [(2048, 2), (128, 2), (512, 5)])
def test_results_repeat_bit_by_bit_beside_another_process(block_size: int, topk: int) -> None:
    """A GPU that changes from process to process makes some warps late: no one may have overwritten what they read."""
    lengths = [3000, 0, 1, 5191]
    tensors, layout = inputs(lengths, 4, 1, 128, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    q, k, v, dout = tensors
    ours = build("triton", 128, block_size=block_size, topk=topk)
    selection = ours.select(q, ours.summarize(k, layout), layout)
    want = ours.attend(q, k, v, layout, selection)
    state = BackwardState(dout, q, k, v, *want)
    gradients = ours.attend_backward(state, layout, selection)
    differs = torch.zeros(5, dtype=torch.int64, device="cuda")
    with subprocess.Popen([sys.executable, "-c", BESIDE], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            end = time.monotonic() + 5
            while time.monotonic() < end:
                got = [ours.attend(q, k, v, layout, selection) for _ in range(20)]
                found = [(*x, *ours.attend_backward(state, layout, selection)) for x in got]
                for result in found:
                    differs += torch.stack([(a != b).any() for a, b in zip(result, (*want, *gradients), strict=True)])
                torch.cuda.synchronize()
        finally:
            other.kill()
    assert differs.tolist() == [0] * 5, "how often out, lse, dq, dk and dv differed"


def test_the_public_function_takes_the_kernels_and_strided_inputs() -> None:
    qkv = make_qkv(700, 12, 2, 64, "cuda", torch.bfloat16)[0].detach()
    q, k, v = (x.requires_grad_() for x in qkv.split([8, 2, 2], dim=1))
    options: dict[str, Any] = {"block_size": 64, "topk": 4}
    out = only(moba_attention(q, k, v, **options, backend="triton"))
    plain = only(moba_attention(*(x.detach().clone() for x in (q, k, v)), **options))
    assert torch.equal(out, plain)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.float().square().sum(), (q, k, v)))


def test_more_than_2_31_elements_in_one_tensor() -> None:
    """q, out and dq of 2.2e9 elements: the last rows are right, so addresses are 64 bits wide everywhere."""
    tokens, heads, head_dim, block_size = 2**19 + 300, 32, 128, 4096
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator)
    k, v = (torch.randn(tokens, 1, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in "kv")
    assert q.numel() > 2**31
    ours, layout = build("triton", head_dim, block_size=block_size, topk=1), layout_of([tokens], "cuda")
    (out, lse, dq, dk, dv), _ = run(ours, [q, k, v, q], layout)
    last = slice(tokens // block_size * block_size, tokens)
    tail = [x[last].contiguous() for x in (q, k, v, q)]
    layout = layout_of([tail[0].shape[0]], "cuda")
    want, _ = run(ours, tail, layout)
    for name, a, b in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), (want[0], *want[2:]), strict=True):
        assert torch.equal(a[last], b), name
    assert torch.equal(lse[:, last], want[1])
