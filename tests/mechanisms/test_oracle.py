"""The ideal selection against an oracle in float64 that sorts the blocks of every query and head: outputs, gradients;
ranks that share a sequence; documents; decoding; full attention where nothing is left out."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kind import StageContext
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.gates import grid
from moba_train.model.rope import apply_rope, rope_cos_sin
from tests.attention.kind_checks import MODEL, Layer, make_layer, results
from tests.mechanisms.test_distilled_gates_gpu import WIDE, moved

LENGTHS = [12, 0, 1, 27]
CASES: dict[str, dict[str, Any]] = {
    "head": {"block_size": 4, "topk": 3},
    "group": {"block_size": 4, "topk": 3, "select": "group"},
    "forced": {"block_size": 4, "topk": 4, "always": ("first", "previous", "current")},
    "tokens": {"block_size": 1, "topk": 6},
    "tokens of a group": {"block_size": 1, "topk": 6, "select": "group", "always": ("first", "previous")},
}
each = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def naive(layer: Layer) -> list[Tensor]:
    """Sorts the blocks of every query by full attention's probability in them, and attends to the first ones."""
    options = layer.kind.options
    edges = layer.layout.cu_seqlens.tolist()
    rows = [naive_document(layer, slice(first, stop)) for first, stop in pairwise(edges) if stop > first]
    assert options.topk > 1
    return [torch.cat(rows)]


def naive_document(layer: Layer, rows: slice) -> Tensor:
    options = layer.kind.options
    length = rows.stop - rows.start
    cos, sin = rope_cos_sin(torch.arange(length), layer.model.rope, layer.model.head_width)
    q, k = (apply_rope(x[rows], cos, sin) for x in (layer.q, layer.k))
    heads = q.shape[1]
    group = q.shape[1] // k.shape[1]
    size = options.block_size
    out = []
    for t in range(length):
        scores = [q[t, h] @ k[: t + 1, h // group].T / math.sqrt(q.shape[2]) for h in range(heads)]
        full = [score.detach().softmax(-1) for score in scores]
        own = t // size
        for h in range(heads):
            members = range(h // group * group, (h // group + 1) * group) if options.select == "group" else [h]
            mass = [sum(float(full[m][b * size : (b + 1) * size].sum()) for m in members) for b in range(own)]
            forced = {0} if "first" in options.always and own else set()
            forced |= {own - 1} if "previous" in options.always and own else set()
            free = sorted(set(range(own)) - forced, key=lambda b: -mass[b])
            blocks = {own, *forced, *free[: options.topk - 1 - len(forced)]}
            keys = [s for s in range(t + 1) if s // size in blocks]
            out.append(scores[h][keys].softmax(-1) @ layer.v[rows][keys, h // group])
    return torch.stack(out).view(length, heads, -1)


@each
def test_outputs_and_gradients_are_the_oracles(options: dict[str, Any]) -> None:
    layer = make_layer("oracle", options, LENGTHS)
    torch.testing.assert_close(results(layer), results(layer, naive), rtol=0, atol=1e-11)


@each
def test_chunks_of_queries_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("oracle", options, LENGTHS)
    whole = results(layer)
    monkeypatch.setattr(grid, "_SCORES_PER_CHUNK", {"cpu": 40})
    torch.testing.assert_close(results(layer), whole, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 64, "topk": 4},
        {"block_size": 128, "topk": 3, "select": "group", "always": ("first", "previous")},
        {"block_size": 1, "topk": 300},
    ],
    ids=str,
)
def test_kernels_give_the_numbers_of_the_cpu(options: dict[str, Any], device: torch.device) -> None:
    """But where the next best block has as much probability up to rounding."""
    layer = make_layer("oracle", options, [700, 0, 1, 600], model=WIDE)
    rounded = moved(layer, torch.device("cpu"), torch.bfloat16)
    got, want = (results(moved(rounded, *how)) for how in ((device, torch.bfloat16), (layer.q.device, torch.float32)))
    for mine, other in zip(got[:2], want[:2], strict=True):
        for x, y in zip(mine, other, strict=True):
            difference = (x.float().cpu() - y).abs().flatten(1).amax(1)
            assert (difference <= 4e-2 * y.abs().max()).float().mean() > 0.95


def test_a_gate_never_keeps_more_of_full_attentions_probability() -> None:
    """The budget being equal, the ideal selection has the largest log-sum-exp of the selected scores, head by head."""
    sizes = {"block_size": 4, "topk": 3}
    layer = make_layer("oracle", sizes, [40])
    cos, sin = rope_cos_sin(torch.arange(40), MODEL.rope, MODEL.head_width)
    q, k = (apply_rope(x.detach(), cos, sin) for x in (layer.q, layer.k))
    _, ideal = layer.kind.ideal.attend(q, k, layer.v.detach(), layer.layout, ())
    (gate,) = KINDS["moba"](KINDS["moba"].Options(**sizes), MODEL.head_width).attentions
    selection = gate.select(q, gate.summarize(k, layer.layout), layer.layout)
    _, own = gate.attend(q, k, layer.v.detach(), layer.layout, selection)
    assert (own <= ideal + 1e-12).all()
    assert (own < ideal - 1e-3).any()


def test_what_cannot_be_is_refused_by_name() -> None:
    context = StageContext(MODEL, 64, 1, 1, False, "cpu", "in layer 0")
    problems = KINDS["oracle"].problems
    forced = KINDS["oracle"].Options.model_validate({"topk": 2, "always": ("first", "previous")})
    assert next(problems(forced, context)).startswith("topk: given 2 in layer 0; allowed: at least the 3 blocks")
    long = KINDS["oracle"].Options.model_validate({"block_size": 128})
    assert next(problems(long, context)).startswith("block_size: given 128 in layer 0")
