"""The kind `moa`: against its definition in plain softmax, and what it promises to plans, recipes and exports."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from moba_train.attention.engine import LOCAL_ENGINE, OperatorEngine
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import Layout
from moba_train.attention.observer import observing
from moba_train.attention.shard import Generation, Shard
from moba_train.mechanisms.moa import moa_kind as moa_attention
from moba_train.mechanisms.moa.moa_kind import MoaKind
from moba_train.mechanisms.moa.spans import Spans
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.tools.convert.hf_export import layer_entry, layer_problem
from moba_train.tools.hf.config import parse_layer
from moba_train.tools.needle.answers import SelectedBlocks
from tests.attention.kind_checks import MODEL, Layer, make_layer, results, run_layer

LENGTHS = [12, 0, 1, 61]
MIXED: dict[str, Any] = {
    "alpha": (4, -20, 6, 9),
    "beta": (0.0, 0.6, 0.3, 1.0),
    "sink_tokens": 3,
    "block_size": 4,
    "max_length": 256,
}
SIZES = (4, 16, 4, 0)
"""Tokens of a block of each head: the second one's span of 256 tokens, 134, would have 34 blocks of 4."""
CASES = {"mixed": MIXED, "one": {"alpha": 5, "beta": 0.25, "sink_tokens": 0, "block_size": 4, "max_length": 256}}
each = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def attended(length: int, alpha: int, beta: float, size: int, sinks: int) -> torch.Tensor:
    """Mask [length, length] of one head in one document, token by token; size 0: all earlier tokens."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        own = query // size if size else 0
        blocks = max(1, math.ceil((alpha + Fraction(str(beta)) * (own + 1) * size) / size)) if size else 1
        for key in range(query + 1):
            in_span = not size or key // size > own - blocks
            mask[query, key] = in_span or key < math.ceil(sinks / size) * size
    return mask


def masks(layer: Layer, sizes: Sequence[int]) -> torch.Tensor:
    """[H, T, T] of a layer."""
    options = layer.kind.options
    rules = options.rules() * (4 // len(options.rules()))
    lengths = layer.layout.cu_seqlens.diff().tolist()
    heads = []
    for rule, size in zip(rules, sizes, strict=True):
        documents = (attended(length, rule.alpha, rule.beta, size, options.sink_tokens) for length in lengths)
        heads.append(torch.block_diag(*documents))
    return torch.stack(heads).bool()


def oracle(layer: Layer, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Softmax over what the masks admit, in float64."""
    cos_sin = rope_cos_sin(layer.positions, layer.model.rope, 8)
    q, k = (apply_rope(x, *cos_sin) for x in (layer.q, layer.k))
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) * 8**-0.5
    weights = scores.masked_fill(~masks(layer, sizes), -torch.inf).softmax(-1)
    return [torch.einsum("hts,shd->thd", weights, layer.v.repeat_interleave(2, 1))]


@pytest.mark.parametrize(("options", "sizes"), [(MIXED, SIZES), (CASES["one"], (4,) * 4)])
def test_output_and_gradients_are_those_of_the_definition(
    options: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    layer = make_layer("moa", options, LENGTHS)
    assert {rule.block_size for rule in layer.kind.options.rules()} == set(sizes)
    torch.testing.assert_close(results(layer), results(layer, lambda layer: oracle(layer, sizes)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("options", "sizes"), [(MIXED, SIZES), (CASES["one"], (4,) * 4)])
def test_evaluations_see_which_blocks_heads_attend_to(
    options: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    """Whether the block of a token that is asked for is attended to, counted as for a needle."""
    layer = make_layer("moa", options, LENGTHS)
    seen = masks(layer, sizes)
    places = [(query, source) for query in (11, 13, 30, 44, 73) for source in range(0, query + 1, 3)]
    same = [(query, source) for query, source in places if (query > 12) == (source > 12)]
    watched = SelectedBlocks(1, torch.device("cpu"))
    watched.watch([query + 1 for query, _ in same], [source for _, source in same])
    with observing(LOCAL_ENGINE, watched):
        run_layer(layer)
    share = torch.stack([seen[:, query, source] for query, source in same]).double().mean()
    count, total = watched._counts[0].tolist()
    assert count / total == pytest.approx(share.item(), abs=1e-12)
    assert 0.3 < share < 1


def test_few_heads_at_a_time_give_the_numbers_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads share a call until the block ids need more memory than q, or than an allowance for short sequences."""
    layer = make_layer("moa", CASES["one"], LENGTHS)
    want = results(layer)
    monkeypatch.setattr(moa_attention, "_IDS_BYTES", 0)
    small = layer.q[..., :1].bfloat16()
    groups = layer.kind.attentions[0]._head_groups(small, layer.k, layer.layout)
    assert [(group.heads, group.kv_heads) for group in groups] == [((0, 1), (0,)), ((2, 3), (1,))]
    monkeypatch.setattr(moa_attention.SpanAttention, "_head_groups", lambda *_: groups)
    torch.testing.assert_close(results(layer), want, rtol=0, atol=1e-12)


def test_spans_that_hold_the_document_are_full_attention() -> None:
    """Bit for bit where heads attend to everything by their rule or by the document's length, also one by one."""
    full = results(make_layer("full", {}, LENGTHS))
    for options in ({"alpha": 0, "beta": 1.0}, {"alpha": 61}, {"alpha": (131_072, 64, 61, -5), "beta": (0, 0, 0.5, 1)}):
        got = results(make_layer("moa", {"block_size": 4, **options}, LENGTHS))
        exact = not isinstance(options["alpha"], tuple)
        torch.testing.assert_close(got, full, rtol=0, atol=0 if exact else 1e-12)
    kernels = {"alpha": 61, "block_size": 4, "backend": "reference"}
    torch.testing.assert_close(results(make_layer("moa", kernels, LENGTHS)), full, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[0, 0], [1]])
def test_documents_of_hardly_any_tokens(lengths: list[int]) -> None:
    layer = make_layer("moa", MIXED | {"alpha": (4, -(10**18), 10**18, 0), "backend": "reference"}, lengths)
    (out, *_), (_, _, _, dv), _ = results(layer)
    torch.testing.assert_close(out, layer.v.detach().repeat_interleave(2, 1))
    assert dv.shape == layer.v.shape


def test_new_tokens_may_attend_to_everything() -> None:
    """`decode: full`, which the shard says."""

    class AttendsToAll(OperatorEngine):
        def shard(self, layout: Layout) -> Shard:
            shard = LOCAL_ENGINE.shard(layout)
            shard.generation = Generation(attends_to_all=True, states={})
            return shard

    got = run_layer(make_layer("moa", MIXED, LENGTHS), AttendsToAll())
    assert torch.equal(got[0], run_layer(make_layer("full", {}, LENGTHS))[0])


def test_compiled_layers_give_equal_numbers() -> None:
    layer = make_layer("moa", MIXED, LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    torch.testing.assert_close(results(layer, compiled), results(layer), rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [[], [0], [1], [61, 12, 0, 1], [64], [256, 130, 4]])
def test_attended_pairs_are_those_of_the_masks(lengths: list[int]) -> None:
    kind = MoaKind(MoaKind.Options(**MIXED), 8)
    count = 0.0
    for alpha, beta, size in zip(MIXED["alpha"], MIXED["beta"], SIZES, strict=True):
        for length in lengths:
            count += attended(length, alpha, beta, size, 3).sum().item() - length / 2
    assert kind.pairs(MODEL, lengths) == count / 4
    assert kind.flops(MODEL, lengths) == 12 * 4 * 8 * count / 4


def test_spans_are_not_rounded_as_floating_point_is() -> None:
    """7 blocks of 64, where floating point says a little more, and so 8."""
    assert math.ceil(0.07 * 6400 / 64) == 8
    (rule,) = MoaKind.Options(alpha=0, beta=0.07, max_length=8192).rules()
    assert Spans((rule,)).starts(torch.tensor([99])).tolist() == [[93]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": (1, 2), "beta": (0.5,)}, "one number for each query head; given: alpha 2 and beta 1"),
        ({"alpha": ()}, "one number for each query head"),
        ({"beta": 1.5}, "less than or equal to 1"),
        ({"beta": (0.5, -0.1)}, "greater than or equal to 0"),
        ({"alpha": 1.5}, "valid integer"),
        ({"alpha": (True, 2)}, "valid integer"),
        ({"sink_tokens": -1}, "greater than or equal to 0"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MoaKind.Options(**options)


@pytest.mark.parametrize(
    ("options", "context", "message"),
    [
        (
            {"alpha": (1, 2, 3)},
            {},
            r"alpha: given spans of 3 heads in layer 5, but the model has 4 query heads; ",
        ),
        ({"beta": (0.1, 0.2)}, {}, r"beta: given spans of 2 heads in layer 5"),
        ({"max_length": 512}, {}, r"max_length: given 512 in layer 5, .* 1024 tokens; allowed: at least seq_len"),
        ({}, {"tp": 2}, r"parallel.tp: given 2, but kind 'moa' in layer 5 has a span for each head.*; set tp: 1"),
        ({"backend": "triton"}, {}, r"backend: given 'triton' in layer 5, which cannot run: .*CUDA needed; set auto"),
        ({"backend": "triton"}, {"device": None}, r"backend: .*head dim 8, 64 or 128 needed; set auto"),
    ],
)
def test_what_a_stage_cannot_do(options: dict[str, Any], context: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "seq_len": 1024,
        "cp": 1,
        "tp": 1,
        "deterministic": True,
        "device": "cpu",
        "layers": "in layer 5",
    }
    stage = StageContext(MODEL, **(given | context))
    (problem,) = MoaKind.problems(MoaKind.Options(**options), stage)
    assert re.match(message, problem)
    assert not list(MoaKind.problems(MoaKind.Options(**MIXED | {"max_length": 2048}), StageContext(MODEL, **given)))


def test_an_export_says_every_span() -> None:
    kind = MoaKind(MoaKind.Options(**MIXED), 8)
    assert layer_problem(kind, MODEL) == ""
    entry = layer_entry(kind)
    assert entry == {"kind": "moa", **MIXED, "alpha": list(MIXED["alpha"]), "beta": list(MIXED["beta"])}
    assert parse_layer(entry).options == kind.options
