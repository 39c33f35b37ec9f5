"""MoBA composed of varlen flash attention is the same function: on the CPU in float64, on a GPU with every kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from moba_train.attention.kernels import composed, varlen
from moba_train.attention.kernels.varlen import Segments
from moba_train.attention.kernels.varlen.protocol import VarlenKernel
from moba_train.attention.layout import Layout, TokenRanges
from moba_train.attention.moba import moba_attention
from moba_train.attention.protocol import BackwardState
from tests.attention.helpers import make_qkv, only, ranges
from tests.attention.kernel_checks import PACKED, build, error, exact, inputs, layout_of, naive, run, run_in_parts
from tests.attention.oracle_checks import assert_equals_oracle

GRID = pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([23], id="tail"),
        pytest.param([16], id="whole-blocks"),
        pytest.param([3], id="shorter-than-a-block"),
        pytest.param([11, 3, 14], id="packed"),
        pytest.param([1, 9, 1, 1, 12], id="length-1-documents"),
        pytest.param([0, 10, 0, 0, 9, 0], id="empty-documents"),
        pytest.param([0, 0], id="no-tokens"),
    ],
)


@GRID
@pytest.mark.parametrize("topk", [1, 2, 3, 50])
def test_output_lse_and_gradients_equal_the_specification(lengths: list[int], topk: int) -> None:
    assert_equals_oracle(lengths, 4, 2, 16, "cpu", backend="composed", block_size=4, topk=topk)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("select", ["head", "group"])
def test_any_number_of_queries_may_share_a_key_head(heads: int, kv_heads: int, select: str) -> None:
    options: dict[str, Any] = {"block_size": 3, "topk": 3, "select": select, "always": ("current", "first")}
    assert_equals_oracle([13, 7], heads, kv_heads, 16, "cpu", backend="composed", **options)


@pytest.mark.parametrize("block_size", [1, 7, 1000])
def test_every_block_size_from_one_token_to_more_than_the_sequence(block_size: int) -> None:
    assert_equals_oracle([9, 8], 2, 1, 16, "cpu", backend="composed", block_size=block_size, topk=3, scale=0.7)


class Call(NamedTuple):
    rows: int
    segments: int
    causal: bool


def watch(monkeypatch: pytest.MonkeyPatch, most_segments: int = 2**31, dq_buffers: int = 1) -> list[Call]:
    """Every call of the kernel from now on."""
    calls = []

    class Watched(varlen.Cpu):
        @staticmethod
        def forward(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(Call(q.shape[0], segments.cu_q.numel() - 1, segments.causal))
            return varlen.Cpu.forward(q, k, v, segments, scale)

        @staticmethod
        def backward(
            state: BackwardState, segments: Segments, scale: float, deterministic: bool
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            calls.append(Call(state.q.shape[0], segments.cu_q.numel() - 1, segments.causal))
            assert deterministic
            return varlen.Cpu.backward(state, segments, scale, deterministic)

    Watched.most_segments = most_segments
    Watched.dq_buffers = staticmethod(lambda segments, device: dq_buffers)  # type: ignore[method-assign]
    monkeypatch.setattr(varlen, "KERNELS", (Watched,))
    return calls


@pytest.mark.parametrize(("limit", "dq_buffers"), [(12, 1), (80, 1), (150, 1), (400, 1), (400, 3)])
def test_memory_is_bounded_by_parts_that_leave_no_trace(
    limit: int, dq_buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of three tokens, of 19, one head at once, two at once."""
    lengths, selected, group = [25, 3, 9], 2, 2
    monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim: limit)
    calls = watch(monkeypatch, dq_buffers=dq_buffers)
    assert_equals_oracle(lengths, 3 * group, 3, 8, "cpu", backend="composed", block_size=4, topk=selected + 1)
    history = [call.rows for call in calls if not call.causal]
    assert max(history) * dq_buffers <= limit
    assert len(history) >= 2 * 3 * sum(lengths) * group * selected // (2 * limit)  # half of them exist


def test_own_blocks_of_many_heads_are_done_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of more elements than kernels can index; two key/value heads, three of their four queries at once."""
    monkeypatch.setattr(composed, "MOST_ELEMENTS", 3 * 37 * 8)
    calls = watch(monkeypatch)
    assert_equals_oracle([25, 3, 9], 8, 2, 8, "cpu", backend="composed", block_size=4, topk=3)
    assert len([call for call in calls if call.causal]) == 1 + 2 * 2  # all at once in the forward pass


def test_a_kernels_limit_of_segments_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(monkeypatch, most_segments=21)
    assert_equals_oracle([25, 3, 9], 4, 4, 8, "cpu", backend="composed", block_size=4, topk=3)
    assert max(call.segments for call in calls) <= 21
    with pytest.raises(ValueError, match=r"attention\.moba\.backend: 'composed' cannot do .* at most 21 supported"):
        assert_equals_oracle([25, 3, 9], 4, 4, 8, "cpu", backend="composed", block_size=1, topk=3)


@pytest.mark.parametrize(("rows", "head_dim"), [(100, 64), (2**20 * 32, 128), (2**20 * 32, 64), (2**24, 256)])
def test_a_part_is_half_of_q_at_most_and_within_32_bit_indices(rows: int, head_dim: int) -> None:
    entries = composed.slots_at_once(rows, head_dim)
    assert entries * head_dim < 2**31
    assert entries <= max(rows // 2, 2**20)


def test_rows_that_select_nothing_are_not_touched_by_what_others_do() -> None:
    """Documents shorter than a block share parts with long ones; even a NaN there must not reach them."""
    q, k, v = (x.detach() for x in make_qkv(30, 4, 2, 16))
    q[:20], k[:20], v[:20] = (torch.nan,) * 3
    cu_seqlens = torch.tensor([0, 20, 23, 30], dtype=torch.int32)
    options: dict[str, Any] = {"block_size": 4, "topk": 4, "backend": "composed"}
    got = only(moba_attention(q, k, v, **options, cu_seqlens=cu_seqlens))
    alone = only(moba_attention(*(x[20:] for x in (q, k, v)), **options, cu_seqlens=cu_seqlens[1:] - 20))
    assert torch.equal(got[20:], alone)
    assert got[:20].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_exact_as_attention_written_plainly_and_repeats_bit_by_bit(dtype: torch.dtype) -> None:
    tensors, layout = inputs(PACKED, 4, 2, 64, dtype, "cpu"), layout_of(PACKED, "cpu")
    ours = build("composed", 64, block_size=32, topk=4)
    got, selection = run(ours, tensors, layout)
    again, _ = run(ours, tensors, layout)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    check_errors(
        got, tensors, layout, selection[0], 32, ours.scale, slack={torch.float32: 1e-6, torch.bfloat16: 1e-4}[dtype]
    )


def check_errors(
    got: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    layout: Layout,
    selected: torch.Tensor,
    block_size: int,
    scale: float,
    slack: float = 0.0,
) -> None:
    """No worse than attention as one would write it in that dtype; `slack`: the CPU kernel's own exp is less exact."""
    want = exact(tensors, layout, selected, block_size, scale)
    plain = naive(tensors, layout, selected, block_size, scale)
    torch.testing.assert_close(got[1].double(), want[1], atol=2e-5 + slack, rtol=0)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), (got[0], *got[2:]), (want[0], *want[2:]), plain, strict=True):
        assert error(a, b) <= 1.1 * error(c, b) + slack, f"{name}: {error(a, b):.2e}, written plainly {error(c, b):.2e}"


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param([ranges((0, 10)), ranges((10, 30)), ranges((30, 37))], id="edges inside blocks"),
        pytest.param([ranges((0, 6), (30, 37)), ranges((6, 12), (23, 30)), ranges((12, 23))], id="zigzag"),
        pytest.param([ranges((0, 5), (5, 10)), ranges((10, 10), (10, 37))], id="runs that touch"),
        pytest.param([ranges((0, 36)), ranges((36, 37)), ()], id="one query and none"),
    ],
)
def test_shards_of_queries_that_meet_all_keys_are_composed(
    shards: list[TokenRanges], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all-gather has them; 25 and 9 tokens end in short blocks."""
    lengths = [25, 3, 0, 9]
    tensors, layout = inputs(lengths, 4, 2, 16, torch.float64, "cpu"), layout_of(lengths, "cpu")
    want, (selected,) = run(build("reference", 16, block_size=4, topk=3), tensors, layout)
    calls = watch(monkeypatch)
    got, parts_selected = run_in_parts(
        build("composed", 16, block_size=4, topk=3), tensors, layout, shards, all_keys=True
    )
    assert torch.equal(parts_selected, selected)
    torch.testing.assert_close(got, want, atol=1e-13, rtol=0)
    assert len([call for call in calls if call.causal]) == 2 * len([shard for shard in shards if shard])


@pytest.mark.parametrize(
    ("q_ranges", "k_ranges"),
    [
        pytest.param(ranges((20, 30)), ranges((10, 30)), id="some keys"),
        pytest.param(ranges((20, 22), (23, 30)), None, id="a gap"),
    ],
)
def test_what_cannot_be_composed_is_left_to_the_reference(
    q_ranges: TokenRanges, k_ranges: TokenRanges | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watch(monkeypatch)
    q, k, v = (x.detach() for x in make_qkv(30, 4, 2, 16))
    layout = layout_of([30], "cpu")
    mine, part = (Layout(layout.cu_seqlens, 30, 30, q_ranges, runs) for runs in (None, k_ranges))
    results = []
    for backend in ("composed", "reference"):
        ours = build(backend, 16, block_size=4, topk=3)
        selection = ours.select(q[mine.q_tokens], ours.summarize(k, layout), mine)
        results.append(ours.attend(q[mine.q_tokens], k[part.k_tokens], v[part.k_tokens], part, selection))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not calls


# On a GPU, with every kernel that is installed

LONG = [1500, 0, 1, 333, 0, 700, 128]


def case(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> "pytest.ParameterSet":
    return pytest.param(lengths, heads, kv_heads, head_dim, dtype, options)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in varlen.KERNELS if k is not varlen.Cpu], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "dtype", "options"),
    [
        case(PACKED, 4, 2, 64, block_size=64, topk=3),
        case(PACKED, 4, 2, 128, torch.float16, block_size=37, topk=9),
        case(LONG, 8, 2, 128, block_size=128, topk=8),
        case(LONG, 8, 8, 96, block_size=128, topk=4),
        case(LONG, 8, 1, 64, block_size=128, topk=1),
        case(LONG, 6, 2, 192, block_size=80, topk=5, always=("current", "previous", "first")),
        case(LONG, 8, 2, 256, block_size=200, topk=5, select="group"),
        case([3000, 1100], 4, 1, 64, torch.float16, block_size=512, topk=3),
        case([4500], 2, 2, 128, block_size=1040, topk=3),
        case([2049, 513, 0, 1, 9000], 8, 2, 128, block_size=512, topk=9),
        case([100, 20], 4, 2, 128, block_size=16384, topk=12),
        case([0, 0], 4, 2, 128, block_size=128, topk=3),
    ],
)
@pytest.mark.parametrize("limit", [None, 20000])
def test_gpu_outputs_and_gradients(
    kernel: type[VarlenKernel],
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    options: dict[str, Any],
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, dtype, "cuda"), layout_of(lengths, "cuda")
    if reason := kernel.refuses(tensors[0]):
        pytest.skip(reason)
    monkeypatch.setattr(varlen, "KERNELS", (kernel,))
    if limit:
        monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim: limit)
    ours = build("composed", head_dim, **options)
    got, selection = run(ours, tensors, layout)
    again, _ = run(ours, tensors, layout)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not deterministic"
    if sum(lengths):
        check_errors(got, tensors, layout, selection[0], options["block_size"], ours.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in varlen.KERNELS if k is not varlen.Cpu], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("block_size", "topk"), [(128, 4), (512, 3), (1040, 2)])
def test_gpu_shards_of_queries_that_meet_all_keys(
    kernel: type[VarlenKernel], block_size: int, topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [2900, 0, 1, 1195]
    tensors, layout = inputs(lengths, 4, 2, 128, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    if reason := kernel.refuses(tensors[0]):
        pytest.skip(reason)
    monkeypatch.setattr(varlen, "KERNELS", (kernel,))
    ours = build("composed", 128, block_size=block_size, topk=topk)
    want, (selected, *_) = run(ours, tensors, layout)
    true = exact(tensors, layout, selected, block_size, ours.scale)
    for shards in (
        [ranges((0, 1500)), ranges((1500, 4096))],
        [ranges((0, 700), (3000, 4096)), ranges((700, 3000))],
    ):
        got, parts_selected = run_in_parts(ours, tensors, layout, shards, all_keys=True)
        again, _ = run_in_parts(ours, tensors, layout, shards, all_keys=True)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not deterministic"
        assert torch.equal(parts_selected, selected)
        for name, a, b, c in zip(("out", "lse", "dq", "dk", "dv"), got, true, want, strict=True):
            assert error(a, b) <= 1.5 * error(c, b) + 1e-4, name


@pytest.mark.gpu
def test_gpu_more_than_2_31_elements_in_one_tensor() -> None:
    """q, out and dq of 2.2e9 elements: own and history blocks of the first, a middle and the last token are right."""
    tokens, heads, head_dim, block_size = 2**19 + 300, 32, 128, 4096
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator)
    k, v = (torch.randn(tokens, 1, head_dim, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in "kv")
    assert q.numel() > 2**31
    ours, layout = build("composed", head_dim, block_size=block_size, topk=2), layout_of([tokens], "cuda")
    (out, lse, dq, _, _), (selected, *_) = run(ours, [q, k, v, q], layout)
    for token in (0, tokens // 2, tokens - 1):
        for head in (0, heads - 1):
            own = token // block_size
            history = [block for block in selected[head, token].tolist() if block >= 0]
            earlier = [torch.arange(b * block_size, (b + 1) * block_size) for b in history]
            keys = torch.cat([*earlier, torch.arange(own * block_size, token + 1)]).cuda()
            query = q[token, head].double().requires_grad_()
            scores = k[keys, 0].double() @ query * ours.scale
            want = scores.softmax(0) @ v[keys, 0].double()
            (want_dq,) = torch.autograd.grad(want, query, q[token, head].double())
            assert error(out[token, head], want.detach()) < 4 * torch.finfo(torch.bfloat16).eps
            torch.testing.assert_close(lse[head, token].double(), scores.logsumexp(0).detach(), atol=2e-5, rtol=0)
            if token:
                assert error(dq[token, head], want_dq) < 8 * torch.finfo(torch.bfloat16).eps
