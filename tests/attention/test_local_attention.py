"""The LocalAttention contract (attention/protocol.py), on which context parallelism relies, for every registered kind
that is one engine call, and for the attentions that kinds with several calls are made of.

A new attention is its own file, one line in the registry and one entry in `CASES`. The kinds of mechanisms also run
these tests, in tests/mechanisms/test_local_attention.py.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import pytest
import torch

from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kernels.common.merge import merge
from moba_train.attention.layout import Layout, TokenRanges, packed_layout
from moba_train.attention.protocol import BackwardState, LocalAttention
from moba_train.attention.registry import KINDS
from tests.attention.helpers import make_qkv, ranges, triple

# The kind and options for sequences of a few dozen tokens; shards below begin at multiples of 4 tokens.
CASES = [
    pytest.param("full", {}, id="full"),
    pytest.param("moba", {"block_size": 4, "topk": 3}, id="moba"),
    pytest.param("moba", {"block_size": 4, "topk": 3, "select": "group", "always": ("current", "first")}, id="group"),
]
HEAD_DIM, LENGTHS = 8, [12, 0, 1, 27]
TOKENS = sum(LENGTHS)

# A kind of several calls, or of none, has tests of its own.
ONE_CALL = {name for name, kind in KINDS.items() if len(kind(kind.Options(), 16).attentions) == 1}


def build(kind: str | Callable[..., LocalAttention], options: dict[str, Any]) -> LocalAttention:
    """The attention of a kind by its name, or one that kinds with several calls are made of."""
    if not isinstance(kind, str):
        return kind(**options, head_dim=HEAD_DIM)
    (attention,) = KINDS[kind](KINDS[kind].Options(**options), HEAD_DIM).attentions
    return attention


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of `kind` and `options` run for all `CASES` of the file that collects them, which may be another one than
    this; tests of `merging` and `options` for those whose partial results can be merged."""
    cases = metafunc.module.CASES
    if {"kind", "options"} <= {*metafunc.fixturenames}:
        metafunc.parametrize(("kind", "options"), cases)
    if "merging" in metafunc.fixturenames:
        merging = [case for case in cases if build(*cast(tuple[Any, Any], case.values)).facts.merges]
        metafunc.parametrize(("merging", "options"), merging)


def part(whole: Layout, rows: torch.Tensor | None = None, keys: torch.Tensor | None = None) -> Layout:
    """The layout of the queries `rows` and the keys `keys`: ascending indices, None = all."""
    q_ranges, k_ranges = (None if index is None else as_ranges(index.tolist()) for index in (rows, keys))
    return Layout(whole.cu_seqlens, whole.max_seqlen, whole.total, q_ranges, k_ranges)


def as_ranges(index: list[int]) -> TokenRanges:
    first = [i for i in index if i - 1 not in index]
    last = [i for i in index if i + 1 not in index]
    return ranges(*((start, stop + 1) for start, stop in zip(first, last, strict=True)))


@pytest.fixture
def qkv(device: torch.device | str) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach() for x in make_qkv(TOKENS, 4, 2, HEAD_DIM, device))


@pytest.fixture
def whole(device: torch.device | str) -> Layout:
    return packed_layout(LENGTHS, device)


def key_subsets(device: torch.device | str) -> list[torch.Tensor]:
    """Disjoint key sets that cover the sequence: a zigzag shard, nothing, a straddling one, the rest."""
    index = torch.arange(TOKENS, device=device)
    return [index[(index < 6) | (index >= 34)], index[:0], index[6:21], index[21:34]]


def test_every_kind_of_the_core_with_one_call_is_tested_here() -> None:
    core = {name for name in ONE_CALL if KINDS[name].__module__.startswith("moba_train.attention.")}
    assert {case.values[0] for case in CASES} == core


@pytest.mark.parametrize("kind", sorted(ONE_CALL))
def test_default_options_are_usable(kind: str, device: torch.device) -> None:
    (attention,) = KINDS[kind](KINDS[kind].Options(), 16).attentions
    assert attention.facts.alignment >= 1
    q, k, v = make_qkv(20, 4, 2, 16, device, torch.float32)
    out, lse = LOCAL_ENGINE(q, k, v, attention, packed_layout([20], device))
    assert out.shape == q.shape
    assert lse.shape == (4, 20)
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_have_the_inputs_dtype_and_lse_is_float32_or_better(
    kind: str, options: dict[str, Any], dtype: torch.dtype, whole: Layout, qkv: tuple[torch.Tensor, ...]
) -> None:
    attention = build(kind, options)
    q, k, v = (x.to(dtype) for x in qkv)
    for layout in (whole, part(whole, whole.q_tokens, whole.k_tokens)):
        selection = attention.select(q, attention.summarize(k, layout), layout)
        out, lse = attention.attend(q, k, v, layout, selection)
        grads = attention.attend_backward(BackwardState(out, q, k, v, out, lse), layout, selection)
        assert {x.dtype for x in (out, *grads)} == {dtype}
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradients_are_the_derivatives(kind: str, options: dict[str, Any], device: torch.device) -> None:
    """A random sum of the outputs changes along random steps of q, k or v as its gradient says: a wrong entry anywhere
    shows in each of them."""
    layout = packed_layout([7, 0, 6], device)
    attention = build(kind, options)
    inputs = make_qkv(13, 2, 1, HEAD_DIM, device)
    weights = make_qkv(13, 2, 1, HEAD_DIM, device, seed=1)[0].detach()

    def total(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return (weights * LOCAL_ENGINE(*triple(inputs), attention, layout)[0]).sum()

    grads = torch.autograd.grad(total(inputs), inputs)
    eps = 1e-6  # away from q and k that sit on the edge of another selection, it is constant and differences hold
    for seed, which in product((2, 3, 4), range(3)):
        step = make_qkv(13, 2, 1, HEAD_DIM, device, seed=seed)[which].detach()
        ahead, behind = (
            total([x.detach() + side * eps * step if place == which else x.detach() for place, x in enumerate(inputs)])
            for side in (1, -1)
        )
        change = (ahead - behind) / (2 * eps)
        torch.testing.assert_close((grads[which] * step).sum(), change, rtol=1e-7, atol=1e-8)


def test_a_query_that_sees_none_of_the_given_keys_gives_zero_and_minus_infinity(
    kind: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    """Keys of the future, of another document, or none at all: two thirds of a ring's partial results are like this."""
    attention = build(kind, options)
    q, k, v = qkv
    selection = attention.select(q, attention.summarize(k, whole), whole)
    first_document = slice(0, 12)
    for keys in (torch.arange(30, 34, device=device), torch.arange(0, device=device)):
        layout = part(whole, keys=keys)
        out, lse = attention.attend(q, k[keys], v[keys], layout, selection)
        assert torch.equal(out[first_document], torch.zeros_like(out[first_document]))
        assert (lse[:, first_document] == -torch.inf).all()
        grads = attention.attend_backward(
            BackwardState(torch.ones_like(q), q, k[keys], v[keys], out, lse), layout, selection
        )
        assert all(grad.isfinite().all() for grad in grads)
        assert torch.equal(grads[0][first_document], torch.zeros_like(q[first_document]))


def test_merged_results_over_disjoint_keys_are_the_result_over_all(
    merging: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    attention = build(merging, options)
    q, k, v = qkv
    selection = attention.select(q, attention.summarize(k, whole), whole)
    out, lse = attention.attend(q, k, v, whole, selection)
    merged = torch.zeros_like(q), torch.full_like(lse, -torch.inf)
    for keys in key_subsets(device):
        merged = merge(*merged, *attention.attend(q, k[keys], v[keys], part(whole, keys=keys), selection))
    torch.testing.assert_close(merged, (out, lse), rtol=0, atol=1e-13)


def test_gradients_over_disjoint_keys_with_the_merged_results_sum_to_the_whole(
    merging: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    attention = build(merging, options)
    q, k, v = qkv
    selection = attention.select(q, attention.summarize(k, whole), whole)
    out, lse = attention.attend(q, k, v, whole, selection)
    dout = torch.randn_like(out)
    want = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), whole, selection)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys in key_subsets(device):
        part_dq, part_dk, part_dv = attention.attend_backward(
            BackwardState(dout, q, k[keys], v[keys], out, lse), part(whole, keys=keys), selection
        )
        dq += part_dq
        dk[keys], dv[keys] = part_dk, part_dv
    torch.testing.assert_close((dq, dk, dv), want, rtol=0, atol=1e-12)


def test_queries_may_be_split_as_well(
    kind: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    """Each shard of queries selections for itself and attends to all keys; dk and dv add up over the shards."""
    attention = build(kind, options)
    q, k, v = qkv
    summaries = attention.summarize(k, whole)
    selection = attention.select(q, summaries, whole)
    out, lse = attention.attend(q, k, v, whole, selection)
    dout = torch.randn_like(out)
    dq, dk, dv = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), whole, selection)
    sum_dk, sum_dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in key_subsets(device):
        layout = part(whole, rows=rows)
        shard_selection = attention.select(q[rows], summaries, layout)
        shard_out, shard_lse = attention.attend(q[rows], k, v, layout, shard_selection)
        torch.testing.assert_close((shard_out, shard_lse), (out[rows], lse[:, rows]), rtol=0, atol=1e-13)
        shard_dq, shard_dk, shard_dv = attention.attend_backward(
            BackwardState(dout[rows], q[rows], k, v, shard_out, shard_lse), layout, shard_selection
        )
        torch.testing.assert_close(shard_dq, dq[rows], rtol=0, atol=1e-12)
        sum_dk, sum_dv = sum_dk + shard_dk, sum_dv + shard_dv
    torch.testing.assert_close((sum_dk, sum_dv), (dk, dv), rtol=0, atol=1e-12)


def test_queries_and_keys_may_both_be_split(
    merging: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...], device: torch.device
) -> None:
    """What a ring does: every shard of queries meets every shard of keys, with one selection for all of them."""
    attention = build(merging, options)
    q, k, v = qkv
    summaries = attention.summarize(k, whole)
    selection = attention.select(q, summaries, whole)
    out, lse = attention.attend(q, k, v, whole, selection)
    dout = torch.randn_like(out)
    want = attention.attend_backward(BackwardState(dout, q, k, v, out, lse), whole, selection)
    sums = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in key_subsets(device):
        shard_selection = attention.select(q[rows], summaries, part(whole, rows=rows))
        layouts = [(keys, part(whole, rows, keys)) for keys in key_subsets(device)]
        merged = torch.zeros_like(q[rows]), torch.full_like(lse[:, rows], -torch.inf)
        for keys, layout in layouts:
            merged = merge(*merged, *attention.attend(q[rows], k[keys], v[keys], layout, shard_selection))
        torch.testing.assert_close(merged, (out[rows], lse[:, rows]), rtol=0, atol=1e-13)
        for keys, layout in layouts:
            state = BackwardState(dout[rows], q[rows], k[keys], v[keys], *merged)
            for total, index, grad in zip(
                sums, (rows, keys, keys), attention.attend_backward(state, layout, shard_selection), strict=True
            ):
                total[index] += grad
    torch.testing.assert_close(sums, want, rtol=0, atol=1e-12)


def test_key_value_heads_may_be_split_as_well(
    kind: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...]
) -> None:
    """A slice of the key/value heads, with the query heads that share them and its slice of the summaries."""
    attention = build(kind, options)
    q, k, v = qkv
    summaries = attention.summarize(k, whole)
    want = attention.attend(q, k, v, whole, attention.select(q, summaries, whole))
    for kv in range(2):
        of = slice(2 * kv, 2 * kv + 2)
        own = None if summaries is None else summaries[:, kv : kv + 1]
        selection = attention.select(q[:, of], own, whole)
        got = attention.attend(q[:, of], k[:, kv : kv + 1], v[:, kv : kv + 1], whole, selection)
        torch.testing.assert_close(got, (want[0][:, of], want[1][of]), rtol=0, atol=1e-13)


def test_query_heads_that_are_not_coupled_may_be_split(
    kind: str, options: dict[str, Any], whole: Layout, qkv: tuple[torch.Tensor, ...]
) -> None:
    attention = build(kind, options)
    assert attention.facts.couples_heads == (options.get("select") == "group" or kind == "infllm_v2")
    q, k, v = qkv
    summaries = attention.summarize(k, whole)
    want = attention.attend(q, k, v, whole, attention.select(q, summaries, whole))
    if not attention.facts.couples_heads:
        own = None if summaries is None else summaries[:, :1]
        selection = attention.select(q[:, 1:2], own, whole)
        got = attention.attend(q[:, 1:2], k[:, :1], v[:, :1], whole, selection)
        torch.testing.assert_close(got, (want[0][:, 1:2], want[1][1:2]), rtol=0, atol=1e-13)


def test_summaries_of_aligned_shards_add_up_to_the_summary_of_the_sequence(
    kind: str, options: dict[str, Any], device: torch.device
) -> None:
    """Each shard summarises its own keys; blocks it holds nothing of are zero, so that a sum joins them."""
    whole = packed_layout([40], device)
    attention = build(kind, options)
    _, k, _ = (x.detach() for x in make_qkv(40, 4, 2, HEAD_DIM, device))
    summary = attention.summarize(k, whole)
    cut = 12
    assert cut % attention.facts.alignment == 0
    parts = [
        attention.summarize(k[keys], part(whole, keys=keys))
        for keys in (whole.k_tokens[:cut], whole.k_tokens[cut:], whole.k_tokens[:0])
    ]
    if summary is None:
        assert parts == [None, None, None]
    else:
        added = sum(part for part in parts if part is not None)
        assert isinstance(added, torch.Tensor)
        assert torch.equal(added, summary)


@pytest.mark.parametrize(
    "selected",
    [
        pytest.param([3, -1], id="later"),
        pytest.param([2, -1], id="own"),
        pytest.param([0, -1], id="another document"),
        pytest.param([-1, 1], id="behind none"),
        pytest.param([1, 1], id="twice"),
    ],
)
def test_given_blocks_that_a_kernel_would_read_wrongly_are_refused(selected: list[int]) -> None:
    layout = packed_layout([4, 12])  # blocks 0, and 1 to 3
    given = torch.full((1, 16, 2), -1, dtype=torch.int32)
    given[0, 8] = torch.tensor(selected)
    q_THD, k_TKD, _ = make_qkv(16, 1, 1, HEAD_DIM)
    with pytest.raises(ValueError, match=r"query 8 in head 0: given .*from 1 up to, and without, its own block 2"):
        GivenBlocks(4, 2, HEAD_DIM, "auto", "key").given_selection(given, q_THD, k_TKD, layout)
