"""MoBA with a window before the own block, against its definition; the LocalAttention contract is in
test_local_attention.py, the transport `dispatch` in test_dispatch.py."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kernels.common.selection import Choice
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.attention.protocol import BackwardState
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.moba_window import MobaWindowAttention, MobaWindowKind
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention import oracle
from tests.attention.helpers import make_qkv
from tests.attention.kernel_checks import error, exact, inputs, layout_of, naive
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    token_bytes,
)
from tests.attention.test_sink import with_sink

SIZES = {"block_size": 4, "topk": 3, "window": 8}
LENGTHS = [12, 0, 1, 41, 26]
OPTIONS = [
    pytest.param(SIZES, id="head"),
    pytest.param(SIZES | {"select": "group", "always": ("current", "first")}, id="group"),
    pytest.param(SIZES | {"topk": 1}, id="window alone"),
    pytest.param(SIZES | {"block_size": 8, "topk": 2}, id="one block"),
]


def selected_by_definition(q: Tensor, k: Tensor, lengths: list[int], options: dict[str, Any]) -> oracle.Selection:
    """Blocks of the window before the own one, and the best of those before them, for each query."""
    size, window = options["block_size"], options["window"] // options["block_size"]
    means = oracle.block_means(k, lengths, size)
    select, kv_heads = options.get("select", "head"), k.shape[1]
    selection: oracle.Selection = []
    for head in range(q.shape[1]):
        rows = []
        for token in range(q.shape[0]):
            own, history = oracle.history(lengths, size, token)
            candidates = [block for block in history if block < own - window]
            forced = candidates[:1] if "first" in options.get("always", ()) else []
            gates = {block: oracle.gates(q, means, token, head, kv_heads, select, block) for block in candidates}
            best = sorted(candidates, key=lambda block: (block not in forced, -gates[block], block))
            rows.append(sorted([*best[: options["topk"] - 1], *history[-window:]]))
        selection.append(rows)
    return selection


def by_definition(layer: Layer, options: dict[str, Any], lengths: list[int]) -> list[Tensor]:
    """The layer's output: one softmax over own block, window and selected blocks."""
    cos, sin = rope_cos_sin(layer.positions, layer.model.rope, layer.model.head_width)
    q, k = (apply_rope(x, cos, sin) for x in (layer.q, layer.k))
    selection = selected_by_definition(q.detach(), k.detach(), lengths, options)
    size, scale = options["block_size"], layer.model.head_width**-0.5
    return [oracle.attend(q, k, layer.v, lengths, selection, block_size=size, scale=scale)[0]]


@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_gradients(options: dict[str, Any]) -> None:
    layer = make_layer("moba_window", options, LENGTHS)
    got = results(layer)
    want = results(layer, lambda layer: by_definition(layer, options, LENGTHS))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    full = results(make_layer("full", {}, LENGTHS))
    assert (full[0][0] - want[0][0]).abs().max() > 1e-2, "nothing was left out"


def test_every_block_is_full_attention() -> None:
    full = results(make_layer("full", {}, LENGTHS))
    for backend in ("auto", "reference"):
        layer = make_layer("moba_window", SIZES | {"topk": 9, "backend": backend}, LENGTHS)
        torch.testing.assert_close(results(layer), full, rtol=0, atol=1e-13)


@pytest.mark.parametrize("strategy", STRATEGIES[::3], ids=str)
def test_a_learned_sink_joins_the_softmax_on_ranks(strategy: CPStrategy) -> None:
    with KINDS.registered("moba_window with sink", with_sink(MobaWindowKind)):
        layer = make_layer("moba_window with sink", SIZES, LENGTHS)
        assert layer.parameters is not None
        assert_ranks_equal_one_device(layer, strategy)
        assert (results(layer)[0][0] - results(make_layer("moba_window", SIZES, LENGTHS))[0][0]).abs().max() > 1e-3


def test_those_that_watch_see_the_windows_blocks_as_well() -> None:
    options = MobaWindowAttention.Options(**SIZES)
    attention = MobaWindowAttention(options, 8, section="")
    q, k, _ = (x.detach() for x in make_qkv(sum(LENGTHS), 4, 2, 8, "cpu"))
    layout = packed_layout(LENGTHS)
    selection = attention.select(q, summaries := attention.summarize(k, layout), layout)
    want = selected_by_definition(q, k, LENGTHS, SIZES)
    rows = torch.tensor([3, 40, 79])
    shown = attention.selected_by(rows, selection, layout)
    gate = attention.gate(q, summaries, layout)
    assert shown is not None
    assert gate is not None
    for ids, queries in ((shown.ids_HnC, rows.tolist()), (gate.selected.ids_HnC, range(len(q)))):
        found = [[[block for block in row if block >= 0] for row in head] for head in ids.tolist()]
        assert found == [[head[query] for query in queries] for head in want]
    described = attention.describe_selection(selection, layout).values
    attended = sum(len(row) for head in want for row in head) / len(want) * 4
    own = sum(position % 4 + 1 for length in LENGTHS for position in range(length))
    seen = sum(length * (length + 1) / 2 for length in LENGTHS)
    assert described["key_share"] == pytest.approx((attended + own) / seen)
    assert described["distance"] == pytest.approx(relative_distance(want), rel=1e-6)


def relative_distance(selection: oracle.Selection) -> float:
    """Mean over the freely selected blocks of how far back they are, relative to the candidates' mean."""
    choice = Choice(4, 5, 0, 3)
    found = []
    for head in selection:
        for token, row in enumerate(head):
            own, history = oracle.history(LENGTHS, 4, token)
            if len(history) >= choice.topk:
                mean = (own - history[0] + choice.local) / 2
                found += [(own - block) / mean for block in row if own - block >= choice.local]
    return sum(found) / len(found)


@pytest.mark.parametrize("options", [SIZES, SIZES | {"topk": 1}], ids=str)
def test_attended_pairs(options: dict[str, Any]) -> None:
    kind = MobaWindowKind(MobaWindowKind.Options(**options), 8)
    for length in (1, 12, 29):
        q, k, _ = (x.detach() for x in make_qkv(length, 1, 1, 8, "cpu"))
        ((*rows,),) = selected_by_definition(q, k, [length], options)
        counted = sum(4 * len(row) + token % 4 + 1 for token, row in enumerate(rows)) - length / 2
        assert kind.pairs(MODEL, [length, 3]) == counted + 4.5


def test_kept_is_what_is_selected_where_a_block_is_left_out() -> None:
    kind = MobaWindowKind(MobaWindowKind.Options(**SIZES), 8)
    ids = 2 * 4 * MODEL.heads * 2
    assert token_bytes(kind, seq_len=20).saved == 0
    assert token_bytes(kind, seq_len=24).saved == ids


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"window": 6}, "window: given 6, no multiple of block_size 4; allowed: whole blocks, such as 4 or 8"),
        ({"window": 3}, "window: given 3, no multiple of block_size 4; allowed: whole blocks, such as 4"),
        ({"always": ("current", "previous")}, "always: given 'previous', a block that the window has"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], problem: str) -> None:
    options = MobaWindowKind.Options(**SIZES | changes)
    context = StageContext(MODEL, 32, 1, 1, False, "cpu", "in layers 0-3")
    assert any(found.startswith(problem) for found in MobaWindowKind.problems(options, context))
    with pytest.raises(ValueError, match=re.escape(problem)):
        MobaWindowKind(options, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [64, 128, 512])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (16, 1, 128)])
def test_kernels_equal_float64(block_size: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
    """Outputs and gradients for the selected blocks, whose choice is that of plain PyTorch."""
    lengths = [9000, 0, 1, 700]
    tensors, layout = inputs(lengths, heads, kv_heads, head_dim, torch.bfloat16, device), layout_of(lengths, device)
    sizes: dict[str, Any] = {"block_size": block_size, "topk": 4, "window": 1024}
    attention, plain = (
        MobaWindowAttention(MobaWindowAttention.Options(backend=backend, **sizes), head_dim, section="")
        for backend in ("triton", "reference")
    )
    q, k, v, dout = tensors
    summaries = attention.summarize(k, layout)
    selection = attention.select(q, summaries, layout)
    selected = attention.select_blocks(q, summaries, layout)
    same = (selected == plain.select_blocks(q, summaries, layout)).all(-1)
    assert same.double().mean() > 0.99  # of two with nearly the same gate, either may be taken
    out, lse = attention.attend(q, k, v, layout, selection)
    got = [out, *attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)]
    want = exact(tensors, layout, selected, block_size, attention.scale)
    rounded = naive(tensors, layout, selected, block_size, attention.scale)
    torch.testing.assert_close(lse.double(), want[1], atol=2e-5, rtol=0)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, [want[0], *want[2:]], rounded, strict=True):
        assert error(a, b) <= 1.1 * error(c, b), name
