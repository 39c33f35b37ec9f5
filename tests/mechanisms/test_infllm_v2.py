"""InfLLM-V2 against its definition: scores, selected blocks, outputs and gradients; documents, ranks, decoding."""

import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import block_ids
from moba_train.attention.kernels.common.selection import Choice
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import TokenRange, TokenRanges, packed_layout
from moba_train.mechanisms.infllm_v2.infllm_v2_kind import InfLLMV2Attention, InfLLMV2Kind
from moba_train.model.rope import apply_rope, rope_cos_sin
from tests.attention import test_routing_statistics as routing
from tests.attention.helpers import make_qkv, ranges
from tests.attention.kind_checks import (
    MODEL,
    Layer,
    make_layer,
    results,
    token_bytes,
)

SIZES = {"block_size": 8, "topk": 4, "first_blocks": 1, "local_blocks": 2, "window": 4, "stride": 2, "dense_len": 1}
LENGTHS = [12, 0, 1, 53, 37]

OPTIONS = [
    pytest.param(SIZES, id="blocks"),
    pytest.param(SIZES | {"dense_len": 44}, id="dense"),
    pytest.param(SIZES | {"window": 6, "first_blocks": 0, "local_blocks": 1}, id="wide"),
    pytest.param(SIZES | {"window": 8, "stride": 8, "topk": 3}, id="apart"),
]


def seen_by_definition(q: Tensor, k: Tensor, layer: Layer, options: dict[str, Any]) -> Tensor:
    """bool [H, T, T]: the keys of each query, token by token from section 3 of the paper."""
    block, window, stride = (options[name] for name in ("block_size", "window", "stride"))
    tokens, heads, width = q.shape
    group = heads // k.shape[1]
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    edges = layer.layout.edges
    for start, stop in pairwise(edges):
        for position in range(stop - start):
            own = position // block
            windows = [(at, at + window) for at in range(0, position + 2 - window, stride)]
            for kv in range(k.shape[1]):
                mass = torch.zeros(len(windows), dtype=torch.float64)
                for head in range(kv * group, (kv + 1) * group) if windows else ():
                    means = torch.stack([k[start + a : start + b, kv].mean(0) for a, b in windows])
                    mass += (means @ q[start + position, head] * width**-0.5).softmax(0)
                score = {}
                for candidate in range(own):
                    first, last = candidate * block, (candidate + 1) * block
                    over = [float(m) for m, (a, b) in zip(mass, windows, strict=True) if a < last and b > first]
                    score[candidate] = max(over, default=0.0)
                forced = {b for b in range(own) if b < options["first_blocks"] or b > own - options["local_blocks"]}
                free = sorted(set(score) - forced, key=lambda b: -score[b])
                chosen = forced | {own} | set(free[: options["topk"] - 1 - len(forced)])
                if position < options["dense_len"]:
                    chosen = set(range(own + 1))
                for key in range(position + 1):
                    seen[kv * group : (kv + 1) * group, start + position, start + key] = key // block in chosen
    return seen


def by_definition(layer: Layer, options: dict[str, Any]) -> list[Tensor]:
    """The layer's output: one softmax over the union of all chosen tokens."""
    cos, sin = rope_cos_sin(layer.positions, layer.model.rope, layer.model.head_width)
    q, k = (apply_rope(x, cos, sin) for x in (layer.q, layer.k))
    seen = seen_by_definition(q.detach(), k.detach(), layer, options)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return [torch.einsum("hts,shd->thd", weights, layer.v.repeat_interleave(group, 1))]


@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_gradients(options: dict[str, Any]) -> None:
    layer = make_layer("infllm_v2", options | {"backend": "reference"}, LENGTHS)
    got = results(layer)
    want = results(layer, lambda layer: by_definition(layer, options))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    full = results(make_layer("full", {}, LENGTHS))
    assert (full[0][0] - want[0][0]).abs().max() > 1e-2, "nothing was left out"


def test_heads_may_be_attended_to_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for long sequences, whose ids of all heads would need too much memory."""
    options = SIZES | {"backend": "reference"}
    want = results(make_layer("infllm_v2", options, LENGTHS))
    monkeypatch.setattr("moba_train.mechanisms.infllm_v2.infllm_v2_kind._ENTRIES", 1)
    torch.testing.assert_close(results(make_layer("infllm_v2", options, LENGTHS)), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["attend", "attend_backward"])
def test_results_of_heads_are_freed_before_those_of_the_next(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = getattr(BlockAttention, name)
    made: list[weakref.ref[Tensor]] = []

    def freed_before(*given: Any) -> tuple[Tensor, ...]:
        assert not any(one() is not None for one in made)
        found: tuple[Tensor, ...] = compute(*given)
        made.extend(map(weakref.ref, found))
        return found

    layer = make_layer("infllm_v2", SIZES | {"backend": "reference"}, LENGTHS)
    monkeypatch.setattr("moba_train.mechanisms.infllm_v2.infllm_v2_kind._ENTRIES", 1)
    monkeypatch.setattr(BlockAttention, name, freed_before)
    results(layer)
    assert len(made) > 3


@pytest.mark.parametrize("options", [SIZES | {"topk": 8}, SIZES | {"dense_len": 64}], ids=["blocks", "dense"])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_all_blocks_are_full_attention(options: dict[str, Any], backend: str) -> None:
    got = results(make_layer("infllm_v2", options | {"backend": backend}, LENGTHS))
    torch.testing.assert_close(got, results(make_layer("full", {}, LENGTHS)), rtol=0, atol=1e-13)


def test_a_packed_sequence_of_short_documents_is_dense_where_each_of_them_is() -> None:
    """No longer than dense_len: full attention, whatever the length of the sequence."""
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(dense_len=1024), 8)
    q, k = torch.randn(2500, 2, 8), torch.randn(2500, 1, 8)
    layout = packed_layout([1000, 900, 600])
    options = InfLLMV2Attention.Options(dense_len=128, topk=3, local_blocks=2)
    assert attention.select(q, attention.summarize(k, layout), layout) == ()
    sparse = InfLLMV2Attention(options, 8)
    selected = sparse.select_blocks(q, sparse.summarize(k, layout), layout)
    assert selected is not None
    assert [(selected[0, at] >= 0).sum().item() for at in (127, 191, 999, 1000, 1127)] == [1, 2, 2, 0, 1]


@pytest.mark.parametrize("dense_len", [1, 40])
def test_selected_and_local_blocks_ascend_and_none_is_behind(dense_len: int) -> None:
    """As kernels, statistics and observers of the selection take them."""
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**(SIZES | {"dense_len": dense_len})), 8)
    q, k = torch.randn(sum(LENGTHS), 4, 8), torch.randn(sum(LENGTHS), 2, 8)
    layout = packed_layout(LENGTHS)
    selected = attention.select_blocks(q, attention.summarize(k, layout), layout)
    none = selected < 0
    assert none.any()
    assert not none.all()
    assert ((selected.diff() > 0) | none[..., 1:]).all()
    assert (none[..., 1:] >= none[..., :-1]).all()
    own = block_ids(layout.q_tokens, layout.q_documents, layout, attention.block_size)
    assert (selected < own.unsqueeze(1)).all()


def test_queries_are_selected_for_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 queries, over the ends of documents and of shards, against all at once."""
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**SIZES), 8)
    q, k = torch.randn(len_ := sum(LENGTHS), 4, 8), torch.randn(len_, 2, 8)
    whole = packed_layout(LENGTHS)
    part = whole.part((TokenRange(5, 40), TokenRange(70, 103)), None)
    summaries = attention.summarize(k, whole)
    want = attention.select_blocks(q, summaries, whole)
    monkeypatch.setattr("moba_train.attention.kernels.common.reference._SCORES_PER_CHUNK", {"cpu": 1})
    assert torch.equal(attention.select_blocks(q, summaries, whole), want)
    assert torch.equal(attention.select_blocks(q[part.q_tokens], summaries, part), want[:, part.q_tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_select_nearly_the_same_blocks(dtype: torch.dtype) -> None:
    options = InfLLMV2Attention.Options(block_size=16, topk=8, local_blocks=2, window=8, stride=4, dense_len=1)
    attention = InfLLMV2Attention(options, 64)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(600, heads, 64, generator=generator) for heads in (4, 2))
    layout = packed_layout([590, 10])

    def chosen(q: Tensor, k: Tensor) -> Tensor:
        selected = attention.select_blocks(q, attention.summarize(k, layout), layout)
        assert selected is not None
        return torch.zeros(4, 600, 40).scatter_(2, torch.where(selected < 0, 39, selected).long(), 1)[..., :39]

    exact, rounded = chosen(q.to(dtype).float(), k.to(dtype).float()), chosen(q.to(dtype), k.to(dtype))
    assert (exact * rounded).sum() / exact.sum() > 0.97


def attended_by_counting(length: int, options: dict[str, Any]) -> float:
    layer = make_layer("infllm_v2", options, [length])
    q, k = torch.randn(length, 1, 4).double(), torch.randn(length, 1, 4).double()
    return seen_by_definition(q, k, layer, options).sum().item() - length / 2


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_attended_pairs(options: dict[str, Any]) -> None:
    kind = InfLLMV2Kind(InfLLMV2Kind.Options(**options), 8)
    for length in (1, 44, 53):
        assert kind.pairs(MODEL, [length, 3]) == attended_by_counting(length, options) + 4.5


def test_costs() -> None:
    kind = InfLLMV2Kind(InfLLMV2Kind.Options(), 8)
    full = 12.0 * MODEL.heads * MODEL.head_width
    assert kind.flops(MODEL, [8192, 100]) == full * kind.pairs(MODEL, [8192, 100])
    scores = kind.flops(MODEL, [16384, 100]) - full * kind.pairs(MODEL, [16384, 100])
    assert scores == 2 * MODEL.heads * MODEL.head_width * 16384**2 / 32
    assert token_bytes(kind, seq_len=8192).saved == 0
    q, k = torch.randn(8200, 4, 8), torch.randn(8200, 2, 8)
    layout = packed_layout([8200])
    selection = kind.attentions[0].select(q, kind.attentions[0].summarize(k, layout), layout)
    assert token_bytes(kind, seq_len=8200).saved == sum(x.numel() * 4 for x in selection) / 8200


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topk": 20}, "topk: given 20, but first_blocks 1 and local_blocks 32 count towards it; allowed: >= 33"),
        ({"window": 40}, "window: given 40; allowed: multiples of stride 16"),
        ({"window": 128}, "window: given 128; allowed: at most block_size 64"),
        ({"block_size": 24, "window": 16}, "block_size: given 24; allowed: multiples of stride 16"),
        ({"block_size": 16384}, "block_size: given 16384 in layer 0, which does not fit in a sequence of 4096 tokens"),
        ({"backend": "triton"}, "backend: given 'triton' in layer 0, which cannot run: head dim 8"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    context = StageContext(MODEL, 4096, cp=1, tp=1, deterministic=False, device="cuda", layers="in layer 0")
    problems = "\n".join(InfLLMV2Kind.problems(InfLLMV2Kind.Options(**options), context))
    assert text in problems
    if "in layer 0," not in text:
        with pytest.raises(ValueError, match=f"^{text.split(':')[0]}: "):
            InfLLMV2Kind(InfLLMV2Kind.Options(**options), 8)


def test_defaults_are_the_papers_and_have_no_problems() -> None:
    context = StageContext(MODEL, 32768, cp=1, tp=1, deterministic=False, device="cpu", layers="in layer 0")
    options = InfLLMV2Kind.Options()
    assert list(InfLLMV2Kind.problems(options, context)) == []
    assert options.topk == 1 + 32 + 63
    assert (options.block_size, options.window, options.stride, options.dense_len) == (64, 32, 16, 8192)


@pytest.mark.parametrize("q_ranges", [None, ranges((5, 20), (34, 60))], ids=["all queries", "a shard"])
@pytest.mark.parametrize("dense_len", [1, 22])
def test_local_blocks_and_dense_queries_are_not_free(
    dense_len: int, q_ranges: TokenRanges | None, device: torch.device
) -> None:
    q, k, _ = (x.detach() for x in make_qkv(sum(routing.LENGTHS), 4, 2, 8, device))
    sizes = {"block_size": routing.BLOCK, "topk": 4, "first_blocks": 1, "local_blocks": 2, "dense_len": dense_len}
    attention = InfLLMV2Attention(InfLLMV2Attention.Options(**sizes, window=4, stride=2), 8)
    assert routing.compare(attention, q, k, Choice(*sizes.values()), q_ranges, alike=2)["selected"]
