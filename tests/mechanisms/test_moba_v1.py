"""MoBA's v1, a softmax for each block: against loops in float64, on ranks, in packed documents, while decoding."""

from typing import Any

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.attention.protocol import AttentionFacts
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.moba_v1 import MobaV1Kind, SummedMoba
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.parallel.context.policy import choose_strategy
from moba_train.parallel.context.strategy import AttentionShape
from moba_train.tools.convert.hf_export import layer_entry, layer_problem
from tests.attention.helpers import make_qkv, triple
from tests.attention.kernel_checks import error, inputs, layout_of, run
from tests.attention.kind_checks import (
    MODEL,
    RING_IN_PARTS,
    Layer,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    token_bytes,
)
from tests.attention.oracle import block_means, cut_blocks, gates, history, select_blocks
from tests.attention.test_key_conv import assert_equals_convolved_keys, widths

LENGTHS = [12, 0, 1, 27]
SMALL: dict[str, Any] = {"block_size": 4, "topk": 3}
merges = pytest.mark.parametrize("merge", ["sum", "gate"])


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: list[int],
    *,
    merge: str,
    block_size: int,
    topk: int,
    select: str = "head",
    always: tuple[str, ...] = ("current",),
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): every query and head has a list of blocks, and each block a softmax written out; autograd's
    gradients. Weights are numbers without gradient."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    scale = width**-0.5 if scale is None else scale
    blocks = cut_blocks(lengths, block_size)
    chosen = select_blocks(q, k, lengths, block_size=block_size, topk=topk, select=select, always=always)
    means = block_means(k.detach(), lengths, block_size)
    out, lse = [], []
    for token in range(tokens):
        own, _ = history(lengths, block_size, token)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            picked = chosen[head][token]
            weights = [1.0] * len(picked)
            if merge == "gate" and picked:
                fits = [scale * gates(q.detach(), means, token, head, kv_heads, select, block) for block in picked]
                weights = torch.tensor(fits, dtype=torch.float64).softmax(0).tolist()
            total = torch.zeros_like(v[0, kv_head])
            scores: list[torch.Tensor] = []
            for block, weight in [(own, 1.0), *zip(picked, weights, strict=True)]:
                begin, end, _ = blocks[block]
                seen = slice(begin, min(end, token + 1))
                scores.append(scale * (k[seen, kv_head] @ q[token, head]))
                total = total + weight * (scores[-1].softmax(0) @ v[seen, kv_head])
            out.append(total)
            lse.append(torch.cat(scores).logsumexp(0))
    return torch.stack(out).view(tokens, heads, width), torch.stack(lse).view(tokens, heads).T


def attention_of(options: dict[str, Any], head_dim: int = 8) -> Any:
    (attention,) = MobaV1Kind(MobaV1Kind.Options(**options), head_dim).attentions
    return attention


def build_summed(kind: str, head_dim: int, merge: str, **options: Any) -> SummedMoba:
    """A softmax for each block; `merge`: sum or gate."""
    chosen = MobaV1Kind.Options(backend=kind, merge=merge, **options)
    return SummedMoba(chosen, head_dim, section="attention.moba_v1", gated=merge == "gate")


@merges
@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "options"),
    [
        (LENGTHS, 4, 2, {}),
        ([13, 7], 4, 1, {"select": "group", "always": ("current", "first")}),
        ([1, 9, 1, 12], 2, 2, {"block_size": 3, "topk": 50}),
        ([9], 2, 1, {"topk": 1}),
        ([0, 0], 2, 1, {}),
    ],
    ids=["packed", "group", "more than there are", "own block", "nothing"],
)
def test_output_lse_and_gradients_equal_the_loops(
    merge: str, backend: str, lengths: list[int], heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    options = {**SMALL, **options, "merge": merge, "backend": backend}
    tensors = make_qkv(sum(lengths), heads, kv_heads, 8)
    got = LOCAL_ENGINE(*triple(tensors), attention_of(options), packed_layout(lengths))
    if not sum(lengths):
        assert got[0].shape == tensors[0].shape
        return
    want = oracle(*tensors, lengths, **{key: value for key, value in options.items() if key != "backend"})
    torch.testing.assert_close(got, (want[0].detach(), want[1].detach()), rtol=0, atol=1e-12)
    weight = torch.arange(got[0].numel(), dtype=torch.float64).view_as(got[0]).cos()
    grads = [torch.autograd.grad((out * weight).sum(), tensors) for out in (got[0], want[0])]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-11)


@merges
def test_the_layer_is_the_loops_on_rotated_queries_and_keys(merge: str) -> None:
    layer = make_layer("moba_v1", {**SMALL, "merge": merge}, LENGTHS)

    def plain(layer: Layer) -> list[torch.Tensor]:
        rope = rope_cos_sin(layer.positions, layer.model.rope, 8)
        q, k = (apply_rope(x, *rope) for x in (layer.q, layer.k))
        return [oracle(q, k, layer.v, LENGTHS, merge=merge, **SMALL)[0]]

    got, want = results(layer), results(layer, plain)
    torch.testing.assert_close((got[0], got[1]), (want[0], want[1]), rtol=0, atol=1e-11)


@merges
def test_parts_of_the_work_leave_no_trace(merge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of a few tokens, one key/value head at a time."""
    from moba_train.attention.kernels import composed

    tensors = [x.detach() for x in make_qkv(37, 6, 3, 8)]
    attention = attention_of({**SMALL, "merge": merge, "backend": "composed"})
    want = LOCAL_ENGINE(*triple(tensors), attention, packed_layout([25, 3, 9]))
    monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim: 12)
    assert_equal = torch.testing.assert_close
    assert_equal(LOCAL_ENGINE(*triple(tensors), attention, packed_layout([25, 3, 9])), want, rtol=0, atol=1e-13)


@merges
def test_bf16_is_as_exact_as_its_rounding(merge: str) -> None:
    options = {"block_size": 32, "topk": 4, "merge": merge}
    tensors = [x.detach().bfloat16() for x in make_qkv(150, 4, 2, 16)]
    layout = packed_layout([100, 50])
    exact = attention_of({**options, "backend": "reference"}, 16)
    selection = exact.select(tensors[0], exact.summarize(tensors[1], layout), layout)
    for backend in ("reference", "composed"):
        attention = attention_of({**options, "backend": backend}, 16)
        got, _ = attention.attend(*tensors, layout, selection)
        want, _ = exact.attend(*(x.double() for x in tensors), layout, selection)
        assert (got - want).abs().max() < 0.03 * want.abs().max()


def test_a_sum_over_all_blocks_differs_from_full_attention_and_a_softmax_does_not() -> None:
    """MoBA's author: sums could not be debugged against full attention; with one softmax, k >= n compares strictly."""
    tensors = [x.detach() for x in make_qkv(40, 4, 2, 8)]
    layout = packed_layout([27, 13])
    (full,) = FullKind(FullKind.Options(backend="reference"), 8).attentions
    want, _ = LOCAL_ENGINE(*triple(tensors), full, layout)
    error = {}
    for merge in ("sum", "gate", "softmax"):
        attention = attention_of({"block_size": 4, "topk": 7, "merge": merge, "backend": "reference"})
        error[merge] = float((LOCAL_ENGINE(*triple(tensors), attention, layout)[0] - want).abs().max())
    assert error["softmax"] < 1e-14, error
    assert error["sum"] > 1, error
    assert error["gate"] > 0.1, error
    # Within one block there is nothing to join.
    one = attention_of({"block_size": 32, "topk": 3})
    torch.testing.assert_close(LOCAL_ENGINE(*triple(tensors), one, layout)[0], want, rtol=0, atol=1e-14)


def test_softmax_is_moba_to_the_bit() -> None:
    layers = [
        make_layer(name, {**SMALL, **extra}, LENGTHS)
        for name, extra in (("moba", {}), ("moba_v1", {"merge": "softmax"}))
    ]
    moba, v1 = (results(layer) for layer in layers)
    for a, b in zip((*moba[0], *moba[1]), (*v1[0], *v1[1]), strict=True):
        assert torch.equal(a, b)
    assert type(layers[0].kind.attentions[0]) is type(layers[1].kind.attentions[0])


@merges
def test_auto_never_takes_dense_attention(merge: str) -> None:
    """A document of topk blocks, where MoBA's `auto` is dense."""
    tensors = [x.detach() for x in make_qkv(12, 2, 1, 8)]
    results = [
        LOCAL_ENGINE(
            *triple(tensors), attention_of({**SMALL, "merge": merge, "backend": backend}), packed_layout([12])
        )[0]
        for backend in ("auto", "reference")
    ]
    assert torch.equal(*results)


def test_a_ring_that_attends_to_parts_of_the_keys_is_refused_before_any_message() -> None:
    with pytest.raises(ValueError, match=r"parallel\.cp_transport: 'ring' .* hierarchical or dispatch"):
        assert_ranks_equal_one_device(make_layer("moba_v1", SMALL, LENGTHS), RING_IN_PARTS)
    assert_ranks_equal_one_device(make_layer("moba_v1", {**SMALL, "merge": "softmax"}, LENGTHS), RING_IN_PARTS)


def test_auto_takes_no_ring_with_few_buffers_for_it_even_where_nothing_fits() -> None:
    shape = AttentionShape(
        2**17, heads=28, kv_heads=4, head_dim=128, facts=AttentionFacts(merges=False, work_grows=False)
    )
    arguments = {"ranks": 8, "node_size": 8}
    for memory in (None, 1000):
        strategy, _ = choose_strategy("auto", "auto", shape, memory_bytes=memory, **arguments)
        assert strategy.transport == "allgather"
        assert choose_strategy("ring", "auto", shape, memory_bytes=memory, **arguments)[0].chunks_per_call == 8
    nodes = {"ranks": 8, "node_size": 4}
    _, why = choose_strategy("auto", "auto", shape, **nodes)
    assert "ring: 'ring' attends to the keys of some ranks after those of others" in why
    with pytest.raises(ValueError, match=r"parallel\.cp_transport: 'ring' attends"):
        choose_strategy("ring", "auto", shape, **nodes)


@pytest.mark.gpu
@merges
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 4, 4), (128, 8, 2), (80, 4, 2)])
def test_kernels_on_a_gpu_are_as_exact_as_their_rounding(
    merge: str, head_dim: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` takes the composition; all at once and, with `slots_at_once`, in many parts."""
    from moba_train.attention.kernels import composed

    lengths = [700, 0, 1, 1500, 300]
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, torch.bfloat16, "cuda"), layout_of(lengths, "cuda")
    ours, plain = (build_summed(kind, head_dim, merge, block_size=128, topk=4) for kind in ("auto", "reference"))
    selection = ours.select(tensors[0], ours.summarize(tensors[1], layout), layout)
    want, _ = run(plain, [x.double() for x in tensors], layout, selection[: 1 + (merge == "gate")])
    for limit in (None, 3000):
        if limit:
            monkeypatch.setattr(composed, "slots_at_once", lambda rows, head_dim, limit=limit: limit)
        got, _ = run(ours, tensors, layout, selection)
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert error(a, b) < 0.02, (name, limit, float(error(a, b)))


def context(**changes: Any) -> StageContext:
    values = {"seq_len": 64, "cp": 1, "tp": 1, "deterministic": False, "device": None, "layers": "in layer 0"}
    return StageContext(MODEL, **{**values, **changes})


def test_options_that_cannot_work_are_named() -> None:
    kind = MobaV1Kind
    (problem,) = kind.problems(kind.Options(**SMALL, backend="triton", merge="gate"), context())
    assert problem.startswith("backend: given 'triton' in layer 0 with merge: gate, which has no kernels for sums")
    with pytest.raises(ValueError, match=r"attention\.moba_v1\.backend: 'triton' given, .* auto, composed, reference"):
        kind(kind.Options(**SMALL, backend="triton"), 8)
    (problem,) = kind.problems(kind.Options(block_size=128), context())
    assert problem.startswith("block_size: given 128")


def test_the_plan_counts_pairs_as_moba_and_keeps_selections_of_short_documents_too() -> None:
    moba, v1 = (KINDS[name](KINDS[name].Options(**SMALL), 8) for name in ("moba", "moba_v1"))
    assert v1.pairs(MODEL, LENGTHS) == moba.pairs(MODEL, LENGTHS)
    assert v1.flops(MODEL, LENGTHS) == moba.flops(MODEL, LENGTHS)
    assert (token_bytes(moba, seq_len=12).saved, token_bytes(v1, seq_len=12).saved) == (0, 2 * 4 * 4 * 2)
    gated = MobaV1Kind(MobaV1Kind.Options(**SMALL, merge="gate"), 8)
    assert token_bytes(gated, seq_len=12).saved == 2 * 4 * 4 * 2 + 4 * 4 * 2
    assert layer_entry(v1) == {
        "kind": "moba_v1",
        "block_size": 4,
        "topk": 3,
        "select": "head",
        "always": ["current"],
        "merge": "sum",
    }
    assert layer_problem(v1, MODEL) == ""


@widths
def test_output_and_every_gradient_are_those_of_convolved_keys(width: int) -> None:
    assert_equals_convolved_keys("moba_v1", width)
