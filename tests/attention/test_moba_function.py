"""`moba_attention` is the function that the paper describes, line by line of its specification
(docs/explanation/kernels.md)."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common import reference
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba import moba_attention as any_moba_attention
from tests.attention.helpers import assert_all_close, both, edges, make_qkv, only, run
from tests.attention.oracle import full as oracle_full
from tests.attention.oracle import moba as oracle_moba
from tests.attention.oracle_checks import assert_equals_oracle
from tests.noting import noting

moba_attention = partial(any_moba_attention, backend="reference")


# Lines 1 to 9: the function, in float64, with all gradients


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([23], id="tail"),
        pytest.param([16], id="whole-blocks"),
        pytest.param([3], id="shorter-than-a-block"),
        pytest.param([11, 3, 14], id="packed"),
        pytest.param([1, 9, 1, 1, 12], id="length-1-documents"),
        pytest.param([0, 10, 0, 0, 9, 0], id="empty-documents"),
    ],
)
@pytest.mark.parametrize("topk", [1, 2, 3, 50])
def test_output_lse_and_gradients_equal_the_specification(lengths: list[int], topk: int, device: torch.device) -> None:
    assert_equals_oracle(lengths, 4, 2, 16, device, block_size=4, topk=topk)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("select", ["head", "group"])
def test_any_number_of_queries_may_share_a_key_head(
    heads: int, kv_heads: int, select: str, device: torch.device
) -> None:
    assert_equals_oracle([13, 7], heads, kv_heads, 16, device, block_size=3, topk=3, select=select)


@pytest.mark.parametrize("head_dim", [1, 64, 128])
def test_every_head_width(head_dim: int, device: torch.device) -> None:
    assert_equals_oracle([19], 2, 1, head_dim, device, block_size=4, topk=3)


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize(
    ("always", "topk"),
    [
        (("current", "previous"), 2),
        (("current", "first"), 3),
        (("previous", "first"), 3),  # the own block is selected whether named or not
        (("current", "previous", "first"), 4),
    ],
)
def test_forced_blocks_are_attended_to_and_count_towards_topk(
    select: str, always: tuple[str, ...], topk: int, device: torch.device
) -> None:
    assert_equals_oracle([25, 6], 4, 2, 16, device, block_size=4, topk=topk, select=select, always=always)


def test_softmax_scale_is_the_callers(device: torch.device) -> None:
    assert_equals_oracle([14], 2, 2, 16, device, block_size=4, topk=2, scale=0.7)


@pytest.mark.parametrize("block_size", [1, 7, 1000])
def test_every_block_size_from_one_token_to_more_than_the_sequence(block_size: int, device: torch.device) -> None:
    assert_equals_oracle([9, 8], 2, 1, 16, device, block_size=block_size, topk=3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    block_size=st.integers(1, 6),
    topk=st.integers(1, 5),
    select=st.sampled_from(["head", "group"]),
)
def test_random_documents(lengths: list[int], block_size: int, topk: int, select: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_equals_oracle(lengths, 2, 1, 4, device, block_size=block_size, topk=topk, select=select)


def test_results_do_not_depend_on_how_queries_are_chunked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sequences are worked on in chunks; a small budget makes a short one take several."""
    monkeypatch.setattr(reference, "_SCORES_PER_CHUNK", {"cpu": 1, "cuda": 1})
    assert_equals_oracle([37, 13], 2, 1, 8, device, block_size=4, topk=3)


def test_without_cu_seqlens_the_tokens_are_one_document(device: torch.device) -> None:
    q, k, v = make_qkv(21, 2, 1, 16, device)
    out = only(moba_attention(q, k, v, block_size=4, topk=3))
    torch.testing.assert_close(
        out, only(moba_attention(q, k, v, block_size=4, topk=3, cu_seqlens=edges([21], device))), rtol=0, atol=0
    )


def test_a_document_is_not_changed_by_its_neighbours(device: torch.device) -> None:
    """Blocks start again with each document, so packing changes nothing, whatever the lengths."""
    q, k, v = make_qkv(33, 4, 2, 16, device)
    lengths = [10, 5, 18]
    packed = only(moba_attention(q, k, v, block_size=4, topk=3, cu_seqlens=edges(lengths, device)))
    alone = [
        only(moba_attention(*parts, block_size=4, topk=3))
        for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-13)


def test_the_future_changes_nothing(device: torch.device) -> None:
    """Causality: new tokens behind position 13 leave all earlier outputs bit for bit as they were."""
    q, k, v = (x.detach() for x in make_qkv(30, 2, 1, 16, device))
    before = only(moba_attention(q, k, v, block_size=4, topk=3))
    for x in (q, k, v):
        x[14:] += 3
    after = only(moba_attention(q, k, v, block_size=4, topk=3))
    assert torch.equal(before[:14], after[:14])
    assert not torch.equal(before[14:], after[14:])


def test_topk_1_is_the_own_block_only(device: torch.device) -> None:
    """Moonshot's fast code silently makes this full attention; here nothing outside the block is seen."""
    q, k, v = (x.detach() for x in make_qkv(12, 2, 1, 16, device))
    blocks_alone = [
        only(moba_attention(*parts, block_size=4, topk=1))
        for parts in zip(q.split(4), k.split(4), v.split(4), strict=True)
    ]
    torch.testing.assert_close(
        only(moba_attention(q, k, v, block_size=4, topk=1)), torch.cat(blocks_alone), rtol=0, atol=1e-13
    )


def test_no_gradient_flows_through_the_gate(device: torch.device) -> None:
    """A block that was not selected gets exactly no gradient, although its mean took part in the gate."""
    q, k, v = make_qkv(16, 1, 1, 8, device)
    with torch.no_grad():
        k[4:8] = -10 * q[12:].mean(0)  # block 1 repels the last block's queries
        q[12:] = q[12:].mean(0)
    out = only(moba_attention(q, k, v, block_size=4, topk=3))
    dk, dv = torch.autograd.grad(out[12:].square().sum(), (k, v))
    assert torch.equal(dk[4:8], torch.zeros_like(dk[4:8]))
    assert torch.equal(dv[4:8], torch.zeros_like(dv[4:8]))
    assert dk[:4].abs().min() > 0
    assert dk[8:12].abs().min() > 0


def test_two_runs_are_equal_bit_for_bit(device: torch.device) -> None:
    qkv = make_qkv(70, 4, 2, 16, device, torch.bfloat16)
    first, second = (
        run(lambda q, k, v: both(moba_attention(q, k, v, block_size=8, topk=3, return_lse=True)), qkv) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiled_it_is_compiled_once() -> None:
    """torch.compile takes the attention's name as a constant: equal options must be one attention."""
    counter = CompileCounter()
    compiled = torch.compile(partial(any_moba_attention, block_size=4, topk=2), backend=counter)
    q, k, v = (x.detach() for x in make_qkv(20, 2, 1, 16))
    compiled(q, k, v)
    first = counter.frame_count
    for _ in range(2):
        torch.testing.assert_close(compiled(q, k, v), only(moba_attention(q, k, v, block_size=4, topk=2)))
    assert counter.frame_count == first
    for head_dim in (8, 32):  # the second one is symbolic in torch 2.11
        q, k, v = (x.detach() for x in make_qkv(20, 2, 1, head_dim))
        torch.testing.assert_close(compiled(q, k, v), only(moba_attention(q, k, v, block_size=4, topk=2)))


# Line 10: selecting every block is full attention


@pytest.mark.parametrize("lengths", [[29], [9, 0, 20, 1]])
def test_selecting_every_block_is_full_attention_in_float64(lengths: list[int], device: torch.device) -> None:
    qkv = make_qkv(sum(lengths), 4, 2, 16, device)
    cu_seqlens = edges(lengths, device)
    got = run(
        lambda q, k, v: both(moba_attention(q, k, v, block_size=4, topk=8, cu_seqlens=cu_seqlens, return_lse=True)), qkv
    )
    layout = packed_layout(lengths, device)
    dense = FullAttention(FullAttention.Options(), 16)
    assert_all_close(got, run(lambda q, k, v: LOCAL_ENGINE(q, k, v, dense, layout), qkv))
    assert_all_close(got, run(lambda q, k, v: oracle_full(q, k, v, lengths), tuple(x.cpu() for x in qkv)))


@pytest.mark.parametrize("lengths", [[29], [9, 0, 20, 1], [32]])
def test_auto_takes_dense_attention_exactly_where_every_block_is_selected(
    lengths: list[int], device: torch.device
) -> None:
    """At 32 tokens, 8 blocks of 4, topk 8 selects everything and topk 7 does not: both equal the reference."""
    qkv = make_qkv(sum(lengths), 4, 2, 16, device)
    for topk in (7, 8):
        options: dict[str, Any] = {
            "block_size": 4,
            "topk": topk,
            "cu_seqlens": edges(lengths, device),
            "return_lse": True,
        }
        attention: Any = any_moba_attention  # which returns a pair for `return_lse`
        got, want = (run(partial(attention, backend=b, **options), qkv) for b in ("auto", "reference"))
        assert_all_close(got, want)


def test_auto_takes_dense_attention_for_packed_documents_none_of_which_has_more_blocks_than_topk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What counts is the longest document, not the length of the sequence."""
    calls = []
    noted = noting(lambda *_: calls.append("dense"), FullAttention.attend)
    monkeypatch.setattr(FullAttention, "attend", noted)
    q, k, v = make_qkv(40, 2, 1, 16)
    for lengths, want in (([12, 0, 12, 9, 7], ["dense"]), ([13, 12, 12, 3], [])):
        any_moba_attention(q, k, v, block_size=4, topk=3, cu_seqlens=edges(lengths))
        assert calls == want
        calls.clear()


def test_selecting_every_block_is_full_attention_in_bf16_within_rounding(device: torch.device) -> None:
    """No worse than twice the error that bf16 gives dense attention itself."""
    qkv = make_qkv(150, 4, 2, 64, device, torch.bfloat16)
    layout = packed_layout([100, 50], device)
    dense = FullAttention(FullAttention.Options(), 64)
    exact = run(lambda q, k, v: LOCAL_ENGINE(q, k, v, dense, layout), tuple(x.double() for x in qkv))
    full = run(lambda q, k, v: LOCAL_ENGINE(q, k, v, dense, layout), qkv)
    moba = run(
        lambda q, k, v: both(
            moba_attention(q, k, v, block_size=16, topk=7, cu_seqlens=layout.cu_seqlens, return_lse=True)
        ),
        qkv,
    )
    for truth, a, b in zip(exact, full, moba, strict=True):
        assert (b.double() - truth).norm() <= 2 * (a.double() - truth).norm() + 1e-6 * truth.norm()


# Line 11: the log-sum-exp


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lse_is_natural_log_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v = (x.detach() for x in make_qkv(8, 2, 1, 16, device, dtype))
    out, lse = both(moba_attention(q, k, v, block_size=8, topk=1, return_lse=True))
    assert (out.dtype, lse.dtype, lse.shape) == (dtype, torch.float32, (2, 8))
    first = (q[0].double() * k[0].double()).sum(-1) / 4  # one key: its own scaled score
    torch.testing.assert_close(lse[:, 0].double(), first, rtol=1e-6, atol=1e-6)
    assert not lse.requires_grad


# Line 12: what is legal and what is refused


def test_no_tokens_at_all_are_legal(device: torch.device) -> None:
    q, k, v = make_qkv(0, 4, 2, 16, device)
    out, lse = both(moba_attention(q, k, v, block_size=4, topk=3, cu_seqlens=edges([0, 0], device), return_lse=True))
    assert out.shape == (0, 4, 16)
    assert lse.shape == (4, 0)
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_cu_seqlens_may_be_reused_and_edited_in_place(device: torch.device) -> None:
    """Data loaders refill one buffer: each call counts with what the buffer said at its time, backward included."""
    qkv = make_qkv(24, 2, 1, 16, device)
    buffer = torch.zeros(4, dtype=torch.int32, device=device)

    def through_buffer(lengths: list[int]) -> list[torch.Tensor]:
        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            buffer.copy_(edges(lengths))
            out, lse = both(moba_attention(q, k, v, block_size=4, topk=2, cu_seqlens=buffer, return_lse=True))
            buffer.copy_(edges([24, 0, 0]))  # the next batch arrives before this one's backward
            return out, lse

        return run(function, qkv)

    for lengths in ([7, 9, 8], [1, 22, 1], [7, 9, 8]):
        want = run(lambda q, k, v, n=lengths: oracle_moba(q, k, v, n, block_size=4, topk=2), [x.cpu() for x in qkv])
        assert_all_close(through_buffer(lengths), want)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_in_torchs_own_attention(compiled: bool) -> None:
    """A rotary embedding in float32 leaves q and k in float32 and v in 16 bits."""

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return only(moba_attention(*qkv, block_size=4, topk=2))

    q, k, v = make_qkv(9, 4, 2, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = (torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend)(q.float(), k.float(), v)
        assert attend(q.double(), k.double(), v.double()).dtype == torch.float64
    torch.testing.assert_close(out, attend(q, k, v), rtol=0, atol=0)


def _bad(argument: str, message: str | None = None, **changes: Any) -> "pytest.ParameterSet":
    return pytest.param(argument, changes, id=message or argument)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        _bad("block_size", block_size=0),
        _bad("topk", topk=0),
        _bad("always", "always-exceeds-topk", always=("current", "first"), topk=1),
        _bad("always", "always-unknown", always=("last",)),
        _bad("always", "always-word", always="current"),
        _bad("select", select="token"),
        _bad("topk", "topk-half", topk=2.5),
        _bad("topk", "topk-none", topk=None),
        _bad("block_size", "block_size-word", block_size="x"),
        _bad("q", "array", q=[[[0.0]]]),
        _bad("cu_seqlens", "list", cu_seqlens=[0, 8]),
        _bad("backend", backend="magic"),
        _bad("k", "heads-not-divisible", k=torch.zeros(8, 3, 16), v=torch.zeros(8, 3, 16)),
        _bad("k", "mixed-dtypes", k=torch.zeros(8, 2, 16, dtype=torch.float64)),
        _bad("v", "mixed-dtypes-v", v=torch.zeros(8, 2, 16, dtype=torch.bfloat16)),
        _bad("k", "mixed-devices", k=torch.zeros(8, 2, 16, device="meta")),
        _bad("q", "integers", q=torch.zeros(8, 4, 16, dtype=torch.int64)),
        _bad("q", "dimensions", q=torch.zeros(1, 8, 4, 16)),
        _bad("q", "float8", **dict.fromkeys("qkv", torch.zeros(8, 2, 16, dtype=torch.float8_e5m2))),
        _bad("q", "no-heads", q=torch.zeros(8, 0, 16)),
        _bad("softmax_scale", "scale-0", softmax_scale=0.0),
        _bad("softmax_scale", "scale-nan", softmax_scale=float("nan")),
        _bad("q", "head-dim-0", q=torch.zeros(8, 4, 0), k=torch.zeros(8, 2, 0), v=torch.zeros(8, 2, 0)),
        _bad("k", "fewer-tokens", k=torch.zeros(7, 2, 16)),
        _bad("v", "other-head-dim", v=torch.zeros(8, 2, 8)),
        _bad("v", "other-heads", v=torch.zeros(8, 4, 16)),
        _bad("cu_seqlens", "not-from-0", cu_seqlens=torch.tensor([1, 8], dtype=torch.int32)),
        _bad("cu_seqlens", "not-to-T", cu_seqlens=torch.tensor([0, 7], dtype=torch.int32)),
        _bad("cu_seqlens", "decreasing", cu_seqlens=torch.tensor([0, 5, 3, 8], dtype=torch.int32)),
        _bad("cu_seqlens", "int64", cu_seqlens=torch.tensor([0, 8])),
        _bad("cu_seqlens", "no-document", cu_seqlens=torch.tensor([0], dtype=torch.int32)),
        _bad("cu_seqlens", "other-device", cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta")),
    ],
)
def test_bad_input_is_a_value_error_that_names_the_argument(argument: str, changes: dict[str, Any]) -> None:
    good = {"q": torch.zeros(8, 4, 16), "k": torch.zeros(8, 2, 16), "v": torch.zeros(8, 2, 16)}
    with pytest.raises(ValueError, match=rf"^{argument}\b"):
        moba_attention(**{**good, "block_size": 4, "topk": 2, **changes})
