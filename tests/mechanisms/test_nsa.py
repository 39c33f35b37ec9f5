"""Native Sparse Attention against the paper written out query by query, in float64."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from moba_train.attention.kind import StageContext
from moba_train.attention.layout import TokenRanges, packed_layout
from moba_train.attention.operators import SAVED_OPERATORS
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.mechanisms import window
from moba_train.mechanisms.nsa.compressed import CompressedAttention, CompressedBlocks
from moba_train.mechanisms.nsa.nsa_kind import Compression, NsaKind, NsaOptions
from moba_train.mechanisms.nsa.selection import BlockChoice
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.helpers import ranges
from tests.attention.kind_checks import (
    MODEL,
    Layer,
    assert_ranks_equal_one_device,
    flat,
    in_16_bits,
    kept_bytes,
    make_layer,
    results,
    run_layer,
    token_bytes,
)

SMALL = {"compressed_block": 4, "stride": 2, "block_size": 8, "topk": 4, "window": 6}
LENGTHS = [21, 0, 1, 50, 4, 3, 8]
OPTIONS = [
    pytest.param(SMALL, id="separate"),
    pytest.param({**SMALL, "compressed_block": 6, "block_size": 6, "first": 0, "local": 1}, id="overlaps-of-three"),
    pytest.param({**SMALL, "compressed_block": 8, "stride": 8, "first": 2, "topk": 5}, id="no-overlap"),
]


def paper(layer: Layer) -> list[Tensor]:
    """The layer's output, document by document and query by query (arXiv:2502.11089, equations 5 to 12)."""
    out = [document(layer, slice(start, stop)) for start, stop in pairwise(layer.layout.edges)]
    return [torch.cat(out)]


def document(layer: Layer, rows: slice) -> Tensor:
    options, given, model = layer.kind.options, layer.parameters, layer.model
    x, q, k, v = (tensor[rows] for tensor in layer.inputs())
    length, group = len(x), model.heads // model.kv_heads
    compressed_k, compressed_v = branch(given.compressed, x, model)
    window_k, window_v = branch(given.window, x, model)
    block, stride = options.compressed_block, options.stride
    starts = list(range(0, length - block + 1, stride))
    many_k = compress(given.compress_k, compressed_k, starts, block)
    many_k = rotate(many_k, torch.tensor(starts, dtype=torch.int64), layer)
    many_v = compress(given.compress_v, compressed_v, starts, block)
    q, k, window_k = (rotate(tensor, torch.arange(length), layer) for tensor in (q, k, window_k))
    gates = (x @ given.gates.weight.T).view(length, model.heads, 3).sigmoid()

    out = torch.zeros(length, model.heads, model.head_width, dtype=torch.float64)
    for t in range(length):
        complete = [i for i, start in enumerate(starts) if start + block - 1 <= t]
        for kv in range(model.kv_heads):
            heads = range(kv * group, (kv + 1) * group)
            probabilities = [softmax(q[t, head], many_k[complete, kv]) for head in heads]
            chosen = selected(t, torch.stack(probabilities).sum(0).detach(), [starts[i] for i in complete], options)
            tokens = [token for b in chosen for token in range(b * options.block_size, (b + 1) * options.block_size)]
            tokens = [token for token in tokens if token <= t]
            near = list(range(max(0, t - options.window + 1), t + 1))
            for head, probability in zip(heads, probabilities, strict=True):
                parts = [
                    probability @ many_v[complete, kv],
                    softmax(q[t, head], k[tokens, kv]) @ v[tokens, kv],
                    softmax(q[t, head], window_k[near, kv]) @ window_v[near, kv],
                ]
                out[t, head] = sum(gate * part for gate, part in zip(gates[t, head], parts, strict=True))
    return out


def selected(t: int, probabilities: Tensor, starts: list[int], options: NsaOptions) -> list[int]:
    """Blocks of a query at `t`, by the probabilities, summed over the group, of compressed blocks that begin at
    `starts`."""
    size, stride = options.block_size, options.stride
    own = t // size
    scores = [0.0] * own
    for probability, start in zip(probabilities.tolist(), starts, strict=True):
        for token in range(start, start + options.compressed_block, stride):
            if token // size < own:
                scores[token // size] += probability
    forced = {b for b in range(own + 1) if b < options.first or b > own - options.local}
    others = sorted(set(range(own)) - forced, key=lambda b: -scores[b])
    return sorted([*forced, *others[: options.topk - len(forced | {own})]])


def branch(module: Any, x: Tensor, model: ModelConfig) -> tuple[Tensor, Tensor]:
    shape = len(x), model.kv_heads, model.head_width
    k, v = x @ module.k_proj.weight.T, x @ module.v_proj.weight.T
    if model.qkv_bias:
        k, v = k + module.k_proj.bias, v + module.v_proj.bias
    if model.qk_norm:
        k = k.view(shape)
        k = k / (k.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * module.k_norm.weight
    return k.view(shape), v.view(shape)


def compress(module: Any, x: Tensor, starts: list[int], block: int) -> Tensor:
    """[blocks, K, d]: the MLP of each block's vectors, each with its position's embedding, one after the other."""
    found = [
        torch.cat([x[start + i, kv] + module.positions[i] for i in range(block)])
        for start in starts
        for kv in range(x.shape[1])
    ]
    if not found:
        return x[:0]
    hidden = F.gelu(torch.stack(found) @ module.up.weight.T + module.up.bias)
    return (hidden @ module.down.weight.T + module.down.bias).view(len(starts), x.shape[1], -1)


def rotate(x: Tensor, positions: Tensor, layer: Layer) -> Tensor:
    return apply_rope(x, *rope_cos_sin(positions, layer.model.rope, layer.model.head_width))


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return (k @ q / q.shape[-1] ** 0.5).softmax(0)


@pytest.mark.parametrize("options", OPTIONS)
def test_output_and_every_gradient_are_the_papers(options: dict[str, Any]) -> None:
    layer = make_layer("nsa", options, LENGTHS)
    found = results(layer)
    torch.testing.assert_close(found, results(layer, paper), rtol=0, atol=1e-11)
    assert all(gradient.abs().max() > 1e-6 for gradient in flat(found))


def test_heads_may_be_taken_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where queries are many, to bound the memory of the backward pass."""
    layer = make_layer("nsa", SMALL, LENGTHS)
    want = results(layer)
    calls: list[int] = []
    monkeypatch.setattr(window, "_ROWS_AT_ONCE", 10)
    monkeypatch.setattr(layer.kind.compressed.rows, "attend", counted(layer.kind.compressed.rows.attend, calls))
    torch.testing.assert_close(results(layer), want, rtol=0, atol=1e-11)
    assert calls == [1, 1]


def counted(function: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append(k.shape[1])
        return function(q, k, *rest)

    return attend


def test_own_projections_have_the_layers_bias_and_norm() -> None:
    model = MODEL.model_copy(update={"qkv_bias": True, "qk_norm": True})
    layer = make_layer("nsa", SMALL, [20, 7], model=model)
    torch.testing.assert_close(results(layer), results(layer, paper), rtol=0, atol=1e-11)


def test_all_blocks_behind_a_gate_of_one_are_full_attention() -> None:
    layer = make_layer("nsa", {**SMALL, "topk": 64}, LENGTHS)
    with torch.no_grad():
        layer.x[:, 0] = 1.0
        layer.parameters.gates.weight.zero_()
        layer.parameters.gates.weight[:, 0] = torch.where(torch.arange(12) % 3 == 1, 1000.0, -1000.0)
    full = layer.with_inputs(layer.inputs(), kind=KINDS["full"](KINDS["full"].Options(), 8), parameters=None)
    got, want = results(layer), results(full)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1][1:], want[1][1:], rtol=0, atol=1e-11)


def test_the_papers_sizes_are_usable_defaults() -> None:
    out, grads, parameters = results(make_layer("nsa", {}, [150, 20]))
    assert all(x.isfinite().all() for x in (*out, *grads, *parameters.values()))
    assert parameters["compress_k.positions"].shape == (32, 8)


def test_a_query_that_sees_no_complete_block_has_nothing_from_the_compressed_branch() -> None:
    attention = CompressedAttention(CompressedBlocks(4, 2), 8)
    layout = packed_layout([3, 5])
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (8, 4, 4))
    out, lse = attention.attend(q, k, v, layout, ())
    assert torch.equal(out.abs().sum((1, 2)) > 0, torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]).bool())
    assert torch.equal(lse == -torch.inf, torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]]).bool().expand(2, 8))


@pytest.mark.parametrize("q_ranges", [None, ranges((0, 10), (77, 87)), ranges((15, 24), (60, 73)), ranges((21, 22))])
def test_compressed_attention_has_no_more_rows_than_its_queries_have_newest_blocks(
    q_ranges: TokenRanges | None,
) -> None:
    """Rows that no query needs would be work for nothing, and keys behind the last block."""
    layout = packed_layout(LENGTHS).part(q_ranges, None)
    blocks = CompressedBlocks(4, 2)
    first, end = blocks.seen(layout)
    folded = blocks.fold(layout)
    assert folded.rows == len((end - 1)[first < end].unique())
    assert folded.layout.q_tokens.tolist() == (end - 1)[first < end].unique().tolist()


def test_equation_9() -> None:
    """Blocks of 64 over blocks of 32 at stride 16: those inside count twice, those across an edge once."""
    choice = BlockChoice(CompressedBlocks(32, 16), block_size=64, topk=16, first=1, local=2)
    layout = packed_layout([200])
    probabilities = torch.eye(11).unsqueeze(0)  # query i sees compressed block i alone
    first, second, third, last = choice.block_scores(probabilities, layout)[0].T[:4].tolist()
    assert first == [2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    assert second == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0]
    assert third == [0, 0, 0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert not any(last)


def test_each_rank_compresses_its_share_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    forward = Compression.forward

    def counted(module: Compression, x: Tensor, first: Tensor) -> Tensor:
        counts.append(len(first))
        return forward(module, x, first)

    monkeypatch.setattr(Compression, "forward", counted)
    layer = make_layer("nsa", SMALL, [64])
    assert_ranks_equal_one_device(layer, CPStrategy(4, "allgather", "contiguous", 4))
    assert counts == [32, 32] + [8, 8] * 4
    received = 2 * (32 - 8) * MODEL.kv_heads * MODEL.head_width * 8
    assert token_bytes(layer.kind, width=8, tokens=16, cp=4).activations * 16 == received


def test_compiled_and_recomputed_layers_give_equal_numbers() -> None:
    layer = make_layer("nsa", SMALL, LENGTHS)
    want = results(layer)
    torch.testing.assert_close(results(layer, torch.compile(run_layer, backend="aot_eager")), want, rtol=0, atol=1e-12)

    def recomputed(layer: Layer) -> list[Tensor]:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts(list(SAVED_OPERATORS))

        return checkpoint(run_layer, layer, use_reentrant=False, context_fn=contexts)

    torch.testing.assert_close(results(layer, recomputed), want, rtol=0, atol=0)


LIMITS = [
    ({"stride": 12}, ["compressed_block: given 32, which stride 12 does not divide", "block_size: given 64, which"]),
    ({"block_size": 16}, ["block_size: given 16, less than compressed_block 32"]),
    ({"topk": 2}, ["topk: given 2, but first 1 and local 2 blocks are always selected"]),
]


@pytest.mark.parametrize(("options", "problems"), LIMITS, ids=lambda value: str(value)[:20])
def test_sizes_that_contradict_each_other(options: dict[str, Any], problems: list[str]) -> None:
    context = StageContext(MODEL, 4096, 1, 1, False, "cpu", layers="in layer 0")
    found = list(NsaKind.problems(NsaOptions(**options), context))
    for problem in problems:
        assert sum(text.replace(" in layer 0", "").startswith(problem) for text in found) == 1
    with pytest.raises(ValueError, match=problems[0].split(",")[0]):
        NsaKind(NsaOptions(**options), 8)


def test_blocks_that_do_not_fit_in_the_sequence() -> None:
    context = StageContext(MODEL, 48, 1, 1, False, "cpu", layers="in layer 0")
    (problem,) = NsaKind.problems(NsaOptions(), context)
    assert problem.startswith("block_size: given 64 in layer 0, which does not fit in a sequence of 48 tokens")
    (problem,) = NsaKind.problems(
        NsaOptions(backend="triton"), StageContext(MODEL, 4096, 1, 1, False, "cpu", layers="in layer 0")
    )
    assert problem.startswith("backend: given 'triton' in layer 0, which cannot run")


@pytest.mark.parametrize("options", OPTIONS)
def test_pairs_are_those_counted_one_by_one(options: dict[str, Any]) -> None:
    kind = NsaKind(NsaOptions(**options), 8)
    chosen: Any = kind.options
    pairs = 0.0
    for length in LENGTHS:
        starts = range(0, length - chosen.compressed_block + 1, chosen.stride)
        for t in range(length):
            complete = [start for start in starts if start + chosen.compressed_block - 1 <= t]
            own = t // chosen.block_size
            pairs += len(complete)
            pairs += min(own, chosen.topk - 1) * chosen.block_size + t % chosen.block_size + 0.5
            pairs += min(t + 1, chosen.window) - 0.5
    assert kind.pairs(MODEL, LENGTHS) == pairs


def test_flops_are_those_of_the_products() -> None:
    """Those of the modules are counted by torch; with stride and size equal, no row of a block is unused."""
    layer = make_layer("nsa", {**SMALL, "stride": 4}, [48])
    kind, parameters = layer.kind, layer.parameters
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        parameters.gates(layer.x)
        for module in (parameters.compress_k, parameters.compress_v):
            module(layer.k, kind.blocks.places(layer.layout)[0])
        for module in (parameters.compressed, parameters.window):
            module(layer.x)
    compressed = sum((t + 1) // 4 for t in range(48))
    attention = 4 * 8 * (12 * kind.pairs(MODEL, [48]) + 2 * compressed)
    assert kind.flops(MODEL, [48]) == attention + 3 * counter.get_total_flops()


def test_saved_bytes_are_those_that_autograd_keeps() -> None:
    """In 16 bits, beside what full attention keeps; plain PyTorch keeps no inverse lists of the selected blocks."""
    nsa, full = in_16_bits(make_layer("nsa", SMALL, [256]))
    lists = 4 * MODEL.heads * (SMALL["topk"] - 1)
    own = kept_bytes(nsa) - kept_bytes(full)
    assert own == (token_bytes(nsa.kind, seq_len=256).saved - lists) * 256
