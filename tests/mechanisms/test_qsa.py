"""Entries that an indexer scores, against an oracle in float64 that goes query by query; ranks, documents, decoding."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import grid
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    run_layer,
)
from tests.mechanisms.test_distilled_gates import assert_same_results, chosen, document_attention, kl, rotated
from tests.tools.decoding_checks import assert_decodes_like_training

LENGTHS = [12, 0, 1, 27]
QSA = {"block_size": 4, "topk": 3, "index_dim": 6}
CASES: dict[str, dict[str, Any]] = {
    "warmup": QSA | {"mode": "warmup", "kl_weight": 0.5},
    "sparse": QSA,
    "frozen": QSA | {"train_gate": False},
}
each = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def oracle(layer: Layer) -> list[Tensor]:
    """Output and, where the indexer learns, the divergence of each token times its weight."""
    options = layer.kind.options
    edges = layer.layout.cu_seqlens.tolist()
    parts = [oracle_document(layer, slice(first, stop)) for first, stop in pairwise(edges) if stop > first]
    outputs, divergences = zip(*parts, strict=True)
    learns = options.mode == "warmup" or options.train_gate
    return [torch.cat(outputs), options.kl_weight * torch.cat(divergences)] if learns else [torch.cat(outputs)]


def oracle_document(layer: Layer, rows: slice) -> tuple[Tensor, Tensor]:
    options = layer.kind.options
    own = layer.parameters
    x, q, k, v = (tensor[rows] for tensor in layer.inputs())
    length, heads, _ = q.shape
    groups = k.shape[1]
    size = options.block_size
    width = options.index_dim
    positions = torch.arange(length)

    def normalised(y: Tensor, weight: Tensor) -> Tensor:
        return weight * y / (y.square().mean(-1, keepdim=True) + layer.model.norm_eps).sqrt()

    x = x.detach()
    q_index = normalised((x @ own.q_proj.weight.T).unflatten(-1, (groups, width)), own.q_norm.weight)
    k_index = normalised((x @ own.k_proj.weight.T).unflatten(-1, (groups, width)), own.k_norm.weight)
    q_index, k_index = (rotated(layer, y, positions) for y in (q_index, k_index))
    q, k = rotated(layer, q, positions), rotated(layer, k, positions)
    causal = (positions[:, None] >= positions[None, :]).expand(heads, -1, -1)
    allowed = torch.zeros_like(causal)
    compared: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}
    for token in range(length):
        mine = token // size
        for group in range(groups):
            means = [k_index[entry * size : (entry + 1) * size, group].mean(0) for entry in range(mine)]
            scores = [mean @ q_index[token, group] / math.sqrt(width) for mean in means]
            logits = torch.stack(scores) if scores else torch.zeros(0, dtype=q.dtype)
            history = chosen(logits, options.topk - 1) if options.mode == "sparse" else list(range(mine))
            compared[token, group] = logits[history], history
            members = slice(group * heads // groups, (group + 1) * heads // groups)
            for entry in [*history, mine]:
                allowed[members, token, entry * size : (entry + 1) * size] = True
    out, p = document_attention(q, k, v, allowed & causal)
    divergence = torch.zeros(length, dtype=q.dtype)
    for (token, group), (logits, history) in compared.items():
        if history:
            of_group = p.detach()[group * heads // groups : (group + 1) * heads // groups, token]
            mass = torch.stack([of_group[:, e * size : (e + 1) * size].sum() for e in history])
            divergence[token] = divergence[token] + kl(mass / mass.sum(), logits) / groups
    return out, divergence


@each
def test_outputs_divergences_and_every_gradient_are_those_of_the_oracle(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 150)  # several chunks, of rows and of entries
    assert_same_results(make_layer("qsa", options, LENGTHS), oracle)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_groups_of_heads(kv_heads: int) -> None:
    model = ModelConfig(**(MODEL.model_dump() | {"kv_heads": kv_heads}))
    assert_same_results(make_layer("qsa", {"block_size": 5, "topk": 2, "index_dim": 8}, [17, 4], model=model), oracle)


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_with_every_entry_it_is_full_attention(mode: str) -> None:
    layer = make_layer("qsa", QSA | {"topk": 7, "mode": mode, "train_gate": False}, LENGTHS)
    full = layer.with_inputs(layer.inputs(), kind=KINDS["full"](KINDS["full"].Options(), 8), parameters=None)
    got = results(layer, lambda layer: run_layer(layer)[:1])
    want = results(full)
    torch.testing.assert_close(got[0][0], want[0][0], rtol=0, atol=1e-12)
    for gradient, expected in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_a_later_token_changes_nothing_that_the_indexer_learns_before_it() -> None:
    """The mean of a query's own entry would hold tokens behind the query."""
    layer = make_layer("qsa", CASES["warmup"], [14])
    changed = [x.detach().clone() for x in layer.inputs()]
    for x in changed:
        x[13] += 1.0
    with torch.enable_grad():
        before = run_layer(layer)[1]
        after = run_layer(layer.with_inputs([x.requires_grad_() for x in changed]))[1]
    torch.testing.assert_close(before[:13], after[:13], rtol=0, atol=0)
    assert before[13] != after[13]


def test_steps_along_the_gradient_bring_the_indexer_to_the_attention() -> None:
    layer = make_layer("qsa", CASES["warmup"], LENGTHS)
    optimizer = torch.optim.Adam(layer.parameters.parameters(), lr=0.03)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = run_layer(layer)[1].mean()
        loss.backward(inputs=list(layer.parameters.parameters()))
        optimizer.step()
        losses.append(loss.item())
    assert 0 < losses[-1] < 0.6 * losses[0]


@each
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_that_share_a_sequence(options: dict[str, Any], strategy: CPStrategy) -> None:
    """Their shards begin and end inside entries; one rank has no tokens at all in the second sequence."""
    assert_ranks_equal_one_device(make_layer("qsa", options, LENGTHS), strategy)
    assert_ranks_equal_one_device(make_layer("qsa", options, [9]), strategy)


@each
def test_packed_documents(options: dict[str, Any]) -> None:
    assert_documents_are_independent("qsa", options, LENGTHS)


@pytest.mark.parametrize("mode", ["sparse", "warmup"])
def test_decoding(mode: str) -> None:
    assert_decodes_like_training("qsa", QSA | {"mode": mode})


def test_compiled_layers_give_equal_numbers() -> None:
    layer = make_layer("qsa", QSA, LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    for got, want in zip(results(layer, compiled), results(layer), strict=True):
        for ours, theirs in zip(*(x.values() if isinstance(x, dict) else x for x in (got, want)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_flops_are_those_of_the_products() -> None:
    kind = KINDS["qsa"](KINDS["qsa"].Options(**QSA), MODEL.head_width)
    heads = MODEL.heads
    kv_heads = MODEL.kv_heads
    tokens = sum(LENGTHS)
    attended = kind.costs(MODEL).pairs(LENGTHS)
    of_pair = 2 * heads * MODEL.head_width
    matrices = 2 * MODEL.hidden_size * 2 * kv_heads * 6 * tokens
    scores = 2 * kv_heads * 6
    counted = 6 * of_pair * attended + 2 * matrices + scores * sum(length**2 for length in LENGTHS) / 2 / 4
    assert kind.costs(MODEL).flops(LENGTHS) == counted + of_pair * attended + 2 * scores * attended / 4
