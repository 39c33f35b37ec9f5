"""InfLLM against its definition: window, representatives, blocks, one relative position; documents, ranks, decoding."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.errors import UserError
from moba_train.mechanisms.infllm import InfLLMKind
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import MODEL, STRATEGIES, Layer, make_layer, run_layer
from tests.thread_ranks import thread_transports

SIZES = {"window": 10, "block_size": 4, "topk": 2, "first_blocks": 1, "representatives": 2}
LENGTHS = [12, 0, 1, 47, 30]
OPTIONS = [
    pytest.param(SIZES, id="default"),
    pytest.param(SIZES | {"first_blocks": 0, "topk": 1, "representatives": 4}, id="one"),
    pytest.param(SIZES | {"topk": 0, "first_blocks": 2, "window": 5}, id="stream"),
]


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    return apply_rope(x, *rope_cos_sin(positions, MODEL.rope, x.shape[-1]))


def by_definition(layer: Layer, options: dict[str, Any]) -> Tensor:
    """The layer's output, token by token from section 3 of the paper."""
    window, size = options["window"], options["block_size"]
    heads, group, width = MODEL.heads, MODEL.heads // MODEL.kv_heads, MODEL.head_width
    near_q, near_k = (rotated(x.detach(), layer.positions) for x in (layer.q, layer.k))
    far_q = rotated(layer.q.detach(), torch.full_like(layer.positions, window - 1))
    far_k = layer.k.detach()  # at position 0: as far from every query
    out = torch.zeros_like(layer.q)
    edges = layer.layout.edges
    for start, stop in pairwise(edges):
        for token in range(start, stop):
            read = token - window + 1  # the first token of the window
            memory = set(range(start, max(read, start)))
            kept = set(memory)
            if memory:
                leaving = (read - 1 - start) // size
                scores = {}
                for block in range(leaving):
                    tokens = range(start + block * size, start + (block + 1) * size)
                    relevance = 0.0
                    for kv in range(MODEL.kv_heads):
                        mine = slice(kv * group, (kv + 1) * group)
                        local = {
                            m: float((near_q[m + 1 : m + 1 + window, mine] @ near_k[m, kv]).sum() / window)
                            for m in tokens
                        }
                        best = sorted(tokens, key=local.__getitem__, reverse=True)[: options["representatives"]]
                        relevance += sum(float((far_q[token, mine] @ far_k[m, kv]).sum()) for m in best)
                    scores[block] = relevance
                first = set(range(min(options["first_blocks"], leaving)))
                free = sorted(set(scores) - first, key=lambda block: -scores[block])[: options["topk"]]
                kept = {m for m in memory if (m - start) // size in first | set(free) | {leaving}}
            for head in range(heads):
                kv = head // group
                seen = sorted(kept) + list(range(max(read, start), token + 1))
                logits = torch.stack(
                    [
                        far_q[token, head] @ far_k[m, kv] if m in kept else near_q[token, head] @ near_k[m, kv]
                        for m in seen
                    ]
                )
                out[token, head] = (logits * width**-0.5).softmax(0) @ layer.v.detach()[seen, kv]
    return out


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs(options: dict[str, Any]) -> None:
    layer = make_layer("infllm", options, LENGTHS)
    want = by_definition(layer, options)
    torch.testing.assert_close(run_layer(layer)[0], want, rtol=0, atol=1e-12)
    assert (run_layer(make_layer("full", {}, LENGTHS))[0] - want).abs().max() > 1e-2


@torch.no_grad()
def test_packed_documents() -> None:
    layer = make_layer("infllm", SIZES, LENGTHS)
    (out,) = run_layer(layer)
    for start, length in zip(layer.layout.edges, LENGTHS, strict=False):
        rows = slice(start, start + length)
        own = layer.with_inputs((x[rows] for x in layer.inputs()), layout=packed_layout([length]))
        torch.testing.assert_close(run_layer(own)[0], out[rows], rtol=0, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [LENGTHS, [9]], ids=["some", "none"])  # 9 on 4 ranks: 3, 3, 3 and none
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_that_share_a_sequence(strategy: CPStrategy, lengths: list[int]) -> None:
    layer = make_layer("infllm", SIZES | {"window": 5}, lengths)
    transports, _ = thread_transports(strategy)
    engines = [ContextParallel(strategy, transport) for transport in transports]
    sequence = engines[0].sequence(layer.layout.total)

    @torch.no_grad()
    def rank(engine: ContextParallel) -> Tensor:
        shards = [sequence.shard(x, engine.rank) for x in layer.inputs()]
        own = layer.with_inputs(shards)
        return run_layer(own, engine, sequence.shard(layer.positions, engine.rank))[0]

    with ThreadPoolExecutor(strategy.ranks) as pool:
        got = sequence.to_packed(torch.cat(list(pool.map(rank, engines))))
    torch.testing.assert_close(got, run_layer(layer)[0], rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    layer = make_layer("infllm", SIZES, LENGTHS)
    rounded = layer.with_inputs(x.to(dtype) for x in layer.inputs())
    exact = layer.with_inputs(x.to(dtype).double() for x in layer.inputs())
    (got,) = run_layer(rounded)
    assert got.dtype == dtype
    off = (got.double() - run_layer(exact)[0]).abs().amax((1, 2)) > (0.05 if dtype == torch.bfloat16 else 1e-4)
    assert off.double().mean() < (0.1 if dtype == torch.bfloat16 else 1e-9)  # some select another block in 16 bits


def test_a_gradient_is_refused() -> None:
    with pytest.raises(UserError, match="'infllm' has no gradient"):
        run_layer(make_layer("infllm", SIZES, LENGTHS))


@pytest.mark.parametrize("options", OPTIONS)
def test_attended_pairs(options: dict[str, Any]) -> None:
    kind = InfLLMKind(InfLLMKind.Options(**options), 8)
    window, size = options["window"], options["block_size"]
    for length in (1, 10, 11, 47):
        pairs = 0.0
        for position in range(length):
            pairs += min(position + 1, window) - 0.5
            read = position - window
            if read >= 0:
                pairs += read % size + 1 + min(read // size, options["first_blocks"] + options["topk"]) * size
        assert kind.pairs(MODEL, [length, 2]) == pairs + 2


def test_problems() -> None:
    def problems(training: bool, tp: int = 1, **options: int) -> str:
        context = StageContext(MODEL, 64, 1, tp, False, "cpu", "in layer 1", training)
        return "\n".join(InfLLMKind.problems(InfLLMKind.Options(**options), context))

    assert "moba-train eval RUN attention.default=infllm" in problems(training=True)
    assert problems(training=False) == ""
    assert "parallel.tp: given 2" in problems(training=False, tp=2)
    text = "representatives: given 200; allowed: at most block_size 128"
    assert text in problems(training=False, representatives=200)
    with pytest.raises(ValueError, match=text):
        InfLLMKind(InfLLMKind.Options(representatives=200), 8)
