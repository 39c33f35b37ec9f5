"""Shards: the calls that attention between ranges of a sequence is cut into cover exactly what causality allows."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from moba_train.attention.full import FullAttention
from moba_train.attention.full.calls import kernel_calls, query_chunks
from moba_train.attention.full.kernels import Cudnn
from moba_train.attention.kernels.common.merge import merge
from moba_train.attention.layout import Layout, TokenRanges
from moba_train.attention.protocol import BackwardState, LocalAttention
from tests.attention.helpers import NAMES, assert_all_close, edges, make_qkv, ranges, run
from tests.attention.oracle import full as oracle_full

LENGTHS = {"one": [37], "packed": [5, 0, 1, 0, 17, 1, 13, 0], "long": [2, 30, 5], "short": [1] * 37}
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 37, 4, 2, 16


def as_ranges(tokens: list[int]) -> TokenRanges:
    first = [i for i in tokens if i - 1 not in tokens]
    last = [i + 1 for i in tokens if i + 1 not in tokens]
    return ranges(*zip(first, last, strict=True))


def subsets(tokens: int) -> list[list[int]]:
    return [[i for i in range(tokens) if bits >> i & 1] for bits in range(2**tokens)]


def tokens_of(ranges: TokenRanges) -> list[int]:
    return [token for start, stop in ranges for token in range(start, stop)]


def shards(kind: str, ranks: int, tokens: int = TOKENS) -> list[TokenRanges]:
    """The sequence cut for `ranks` ranks, unevenly where it must; a zigzag's last rank holds two ranges that touch."""
    parts = ranks if kind == "contiguous" else 2 * ranks
    cuts = [round(tokens * i / parts) for i in range(parts + 1)]
    pieces = list(pairwise(cuts))
    if kind == "contiguous":
        return [ranges(piece) for piece in pieces]
    return [ranges(pieces[rank], pieces[-1 - rank]) for rank in range(ranks)]


@pytest.mark.parametrize("bottom_right", [True, False])
def test_chunks_show_each_query_exactly_its_past_for_all_sets_of_queries_and_keys(bottom_right: bool) -> None:
    for q_tokens, k_tokens in product(subsets(6), subsets(6)):
        seen = []
        for chunk in query_chunks(as_ranges(q_tokens), as_ranges(k_tokens)):
            rows = chunk.rows.stop - chunk.rows.start
            visible: list[list[int]] = [[] for _ in range(rows)]
            for keys, causal in chunk.visible(bottom_right):
                assert not causal or bottom_right or keys.stop - keys.start == rows
                for i, of_query in enumerate(visible):
                    of_query += k_tokens[keys.start : keys.stop - (rows - 1 - i if causal else 0)]
            seen += visible
        assert seen == [[key for key in k_tokens if key <= query] for query in q_tokens]


@pytest.mark.parametrize("bottom_right", [True, False])
def test_documents_of_a_call_are_those_of_its_queries_and_keys(bottom_right: bool) -> None:
    """Pairs that a call lets see each other, for all shards of short packed sequences."""
    for lengths, q_tokens, k_tokens in product(([5], [2, 3], [0, 1, 0, 3, 1]), subsets(5), subsets(5)):
        layout = Layout(edges(lengths), max(lengths), 5, as_ranges(q_tokens), as_ranges(k_tokens))
        document = layout.documents(torch.arange(5)).tolist()
        pairs = []
        for rows, calls in kernel_calls(layout, bottom_right):
            for call in calls:
                segments = call.segments
                cu_q, cu_k = segments.cu_q.tolist(), segments.cu_k.tolist()
                assert cu_q[-1] == rows.stop - rows.start
                assert cu_k[-1] == call.keys.stop - call.keys.start
                for i in range(len(lengths)):
                    queries, keys = q_tokens[rows][cu_q[i] : cu_q[i + 1]], k_tokens[call.keys][cu_k[i] : cu_k[i + 1]]
                    assert len(queries) <= segments.max_q
                    assert len(keys) <= segments.max_k
                    if segments.causal:
                        assert len(queries) == len(keys) or (bottom_right and len(queries) < len(keys))
                    hidden = [len(queries) - 1 - j if segments.causal else 0 for j in range(len(queries))]
                    pairs += [(q, k) for q, h in zip(queries, hidden, strict=True) for k in keys[: len(keys) - h]]
        assert sorted(pairs) == [(q, k) for q in q_tokens for k in k_tokens if k <= q and document[q] == document[k]]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_step_of_a_ring_is_one_call(ranks: int) -> None:
    """Any kernel needs one call for the keys of another rank, and none where all of them are in the future."""
    for kind in ("contiguous", "zigzag"):
        for i, j in product(range(ranks), repeat=2):
            parts = query_chunks(shards(kind, ranks)[i], shards(kind, ranks)[j])
            calls = [call for chunk in parts for call in chunk.visible(bottom_right=False)]
            if i != j:
                assert len(calls) == (kind == "zigzag" or j < i)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_keys_are_one_call_for_each_range_of_queries(ranks: int) -> None:
    """This holds for kernels whose causal mask may have more keys than queries."""
    for kind, shard in product(("contiguous", "zigzag"), range(ranks)):
        own = shards(kind, ranks)[shard]
        calls = [chunk.visible(bottom_right=True) for chunk in query_chunks(own, ranges((0, TOKENS)))]
        touching = len(own) == 2 and own[0].stop == own[1].start
        assert [len(call) for call in calls] == [1] * (len(own) - touching)


@cache
def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(x.detach() for x in make_qkv(TOKENS, HEADS, KV_HEADS, HEAD_DIM))


@cache
def truth(documents: str) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] of the whole sequence in float64, from the specification; dout is `upstream()`."""
    return run(lambda q, k, v: oracle_full(q, k, v, LENGTHS[documents]), inputs())


def upstream(out: torch.Tensor) -> torch.Tensor:
    """The gradient that `helpers.run` sends back."""
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)


def by_shards(
    attention: LocalAttention,
    qkv: Sequence[torch.Tensor],
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    queries: list[TokenRanges],
    keys: list[TokenRanges] | None,
) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] put together from a call for each pair of shards; `keys` None: of each shard and all keys.

    Partial results are merged and gradients summed in higher precision, as context parallelism does.
    """
    q, k, v = qkv
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float64, device=q.device)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in qkv)
    dout = upstream(q)
    shards_of_keys: Sequence[TokenRanges | None] = [None] if keys is None else keys
    for q_ranges in queries:
        rows = torch.tensor(tokens_of(q_ranges), device=q.device)
        calls = [
            (
                Layout(cu_seqlens, max_seqlen, len(q), q_ranges, k_ranges),
                torch.tensor(tokens_of(k_ranges or ranges((0, len(q)))), device=q.device),
            )
            for k_ranges in shards_of_keys
        ]
        results = [attention.attend(q[rows], k[seen], v[seen], layout, ()) for layout, seen in calls]
        wide, merged_lse = results[0][0].to(results[0][1].dtype), results[0][1]
        for result in results[1:]:
            wide, merged_lse = merge(wide, merged_lse, *result)
        merged = wide.to(q.dtype), merged_lse
        out[rows], lse[:, rows] = merged[0], merged_lse.double()
        for layout, seen in calls:
            tensors = dout[rows], q[rows], k[seen], v[seen], *merged
            part_dq, part_dk, part_dv = attention.attend_backward(BackwardState(*tensors), layout, ())
            dq[rows] += part_dq
            dk[seen] += part_dk
            dv[seen] += part_dv
    return [out, lse, dq, dk, dv]


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("keys", ["whole", "ring"])
@pytest.mark.parametrize("documents", LENGTHS)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_attention_by_shards_is_attention(ranks: int, kind: str, documents: str, keys: str, backend: str) -> None:
    """Forward and backward in float64, with the keys of all ranks at once or of one rank at a time."""
    queries, lengths = shards(kind, ranks), LENGTHS[documents]
    attention = FullAttention(FullAttention.Options(backend=backend), HEAD_DIM)
    whole = edges(lengths), max(lengths)
    got = by_shards(attention, inputs(), *whole, queries, queries if keys == "ring" else None)
    assert_all_close(got, truth(documents))


@pytest.mark.parametrize("documents", ["one", "packed"])
@pytest.mark.parametrize("keys", ["whole", "ring"])
def test_float32_by_shards_is_as_exact_as_float32(documents: str, keys: str) -> None:
    queries, lengths = shards("zigzag", 3), LENGTHS[documents]
    qkv = tuple(x.float() for x in inputs())
    attention = FullAttention(FullAttention.Options(backend="sdpa"), HEAD_DIM)
    got = by_shards(attention, qkv, edges(lengths), max(lengths), queries, queries if keys == "ring" else None)
    assert_all_close(got, truth(documents), atol=1e-5)


@pytest.mark.parametrize("keys", [ranges((3, 9), (20, 31)), ranges((10, 20)), ranges((0, 12), (14, 37)), ()])
@pytest.mark.parametrize("queries", [ranges((5, 25)), ranges((0, 8), (8, 8), (15, 37)), ranges((36, 37)), ()])
def test_ranges_need_not_be_those_of_a_known_layout(queries: TokenRanges, keys: TokenRanges) -> None:
    """The calls of `sdpa` against the explicit mask of `reference` with one query at a time."""
    q, k, v = inputs()
    rows, seen = torch.tensor(tokens_of(queries)).long(), torch.tensor(tokens_of(keys)).long()
    lengths = LENGTHS["packed"]
    layout = Layout(edges(lengths), max(lengths), TOKENS, queries, keys)
    attention = FullAttention(FullAttention.Options(backend="sdpa"), HEAD_DIM)
    out, lse = attention.attend(q[rows], k[seen], v[seen], layout, ())
    document = layout.documents(torch.arange(TOKENS))
    for i, token in enumerate(rows.tolist()):
        visible = [j for j in seen.tolist() if j <= token and document[j] == document[token]]
        scores = (k[visible].repeat_interleave(2, 1) * q[token]).sum(-1).T * HEAD_DIM**-0.5
        want = (scores.softmax(-1).unsqueeze(1) @ v[visible].repeat_interleave(2, 1).transpose(0, 1)).squeeze(1)
        torch.testing.assert_close(out[i], want, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse[:, i], scores.logsumexp(-1), rtol=0, atol=1e-13)
    grads = attention.attend_backward(
        BackwardState(torch.ones_like(out), q[rows], k[seen], v[seen], out, lse), layout, ()
    )
    assert [x.shape for x in grads] == [q[rows].shape, k[seen].shape, v[seen].shape]
    assert all(x.isfinite().all() for x in grads)


def test_many_chunks_do_not_round_the_sum_of_their_gradients_each_time() -> None:
    """A key that 37 lone queries see gets one rounding of the sum, not 36."""
    q, k, v = (x.bfloat16() for x in inputs())
    attention = FullAttention(FullAttention.Options(backend="reference"), HEAD_DIM)
    every_other = ranges(*((i, i + 1) for i in range(0, TOKENS, 2)))
    rows = torch.arange(0, TOKENS, 2)
    dout = upstream(q)[rows]
    layout = Layout(edges([TOKENS]), TOKENS, TOKENS, every_other)
    out, lse = attention.attend(q[rows], k, v, layout, ())
    state = BackwardState(dout, q[rows], k, v, out, lse)
    *_, dv = attention.attend_backward(state, layout, ())
    exact = attention.attend_backward(BackwardState(*(x.double() for x in state)), layout, ())[2]
    assert (dv[0] - exact[0]).norm() < 2**-8 * exact[0].norm()


def test_auto_takes_the_fused_kernel_for_shards_too() -> None:
    q, k, v = inputs()
    layout = Layout(edges(LENGTHS["packed"]), 17, TOKENS, ranges((20, 37)))
    of_auto, of_sdpa = (
        FullAttention(FullAttention.Options(backend=name), HEAD_DIM).attend(q[20:], k, v, layout, ())
        for name in ("auto", "sdpa")
    )
    assert all(torch.equal(a, b) for a, b in zip(of_auto, of_sdpa, strict=True))


def test_cudnn_is_not_built_anew_for_every_token_that_is_decoded() -> None:
    decoding = Layout(edges([5000]), 5000, 5000, ranges((4999, 5000)))
    shard = Layout(edges([8192]), 8192, 8192, ranges((0, 1024), (7168, 8192)))
    assert not Cudnn.pays(decoding)
    assert Cudnn.pays(shard)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "documents"),
    [("cudnn", [1531]), ("flash", [1531]), ("flash", [300, 0, 1, 700, 0, 530]), ("flash", [1] * 1531)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("keys", ["whole", "ring"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_gpu_kernels_by_shards_are_as_exact_as_whole(
    kind: str, keys: str, head_dim: int, backend: str, documents: list[int], device: torch.device
) -> None:
    """In bf16: at most 1.5 times the error of the same kernel on the whole sequence."""
    tokens = sum(documents)
    qkv = tuple(x.detach() for x in make_qkv(tokens, 4, 2, head_dim, device, torch.bfloat16))
    whole = edges(documents, device), max(documents)
    queries = shards(kind, 4, tokens)

    def results(
        backend: str, qkv: Sequence[torch.Tensor], shards: list[TokenRanges], keys: list[TokenRanges] | None
    ) -> list[torch.Tensor]:
        attention = FullAttention(FullAttention.Options(backend=backend), head_dim)
        return by_shards(attention, qkv, *whole, shards, keys)

    everything = [ranges((0, tokens))]
    exact = results("reference", tuple(x.double() for x in qkv), everything, None)
    once = results(backend, qkv, everything, None)
    got = results(backend, qkv, queries, queries if keys == "ring" else None)
    for name, want, ours, theirs in zip(NAMES, exact, got, once, strict=True):
        error, allowed = ((x.double() - want).norm() for x in (ours, theirs))
        slack = 1e-4 * want.norm() + 1e-5 * want.numel() ** 0.5
        assert error <= 1.5 * allowed + slack, f"{name}: {error} against {allowed}"


@pytest.mark.gpu
def test_gpu_queries_without_keys_are_zero_and_send_nothing_back(device: torch.device) -> None:
    """Exactly, with the kernel that packed documents take: most of a ring's pairs of documents are like this."""
    q, k, v = (x.detach() for x in make_qkv(600, 4, 2, 64, device, torch.bfloat16))
    layout = Layout(edges([300, 0, 300], device), 300, 600, ranges((200, 600)), ranges((0, 200)))
    attention = FullAttention(FullAttention.Options(backend="flash"), 64)
    out, lse = attention.attend(q[200:], k[:200], v[:200], layout, ())
    assert torch.equal(out[100:], torch.zeros_like(out[100:]))
    assert (lse[:, 100:] == -torch.inf).all()
    assert lse[:, :100].isfinite().all()
    lse[:, 100:] = 0.0  # as it is once other keys are merged
    dq, dk, dv = attention.attend_backward(BackwardState(q[200:], q[200:], k[:200], v[:200], out, lse), layout, ())
    assert torch.equal(dq[100:], torch.zeros_like(dq[100:]))
    assert all(x.isfinite().all() for x in (dq, dk, dv))
