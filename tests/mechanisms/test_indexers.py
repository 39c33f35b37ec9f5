"""Short blocks and tokens that an indexer scores, against an oracle in float64 that goes query by query; ranks,
documents, decoding, costs."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import Layout
from moba_train.attention.observer import Observer, observing
from moba_train.attention.protocol import LocalAttention, Selection
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import grid
from moba_train.tools.convert.hf_export import layer_problem
from tests.attention.kind_checks import MODEL, Layer, kept_bytes, make_layer, results, run_layer, token_bytes
from tests.mechanisms.test_distilled_gates import assert_learns, chosen, document_attention, every_nth, kl, rotated

LENGTHS = [12, 0, 1, 27]
QSA = {"block_size": 4, "topk": 3, "index_dim": 6}
FREE = {"first_blocks": 0, "local_blocks": 1}
TWO_HEADS = FREE | {"block_size": 2, "topk": 4, "index_dim": 6, "index_heads": 2}
TWO_STAGES = {"block_size": 2, "topk": 6, "local_blocks": 3, "index_dim": 4, "coarse": {"block_size": 4, "blocks": 4}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qsa warmup": ("qsa", QSA | {"mode": "warmup", "kl_weight": 0.5}),
    "qsa sparse": ("qsa", QSA),
    "qsa, every third query": ("qsa", QSA | {"kl_every": 3}),
    "qsa frozen": ("qsa", QSA | {"train_gate": False}),
    "tokens": ("indexer", {"block_size": 1, "topk": 9, "first_blocks": 2, "local_blocks": 3, "index_dim": 6}),
    "heads warmup": ("indexer", TWO_HEADS | {"mode": "warmup"}),
    "heads frozen": ("indexer", TWO_HEADS | {"train_gate": False}),
    "top-p": ("indexer", FREE | {"block_size": 2, "topk": 6, "index_dim": 6, "top_p": 0.7, "kl_weight": 0.5}),
    "two stages": ("indexer", TWO_STAGES),
    "all": ("indexer", TWO_STAGES | {"index_heads": 3, "top_p": 0.8, "local_blocks": 2}),
}
each = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)


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
    x, q, k, v = (tensor[rows] for tensor in layer.inputs())
    length, heads, _ = q.shape
    groups = k.shape[1]
    size = options.block_size
    positions = torch.arange(length)
    q, k = rotated(layer, q, positions), rotated(layer, k, positions)
    scores = token_scores(layer, x.detach(), groups)
    causal = (positions[:, None] >= positions[None, :]).expand(heads, -1, -1)
    allowed = torch.zeros_like(causal)
    compared: dict[tuple[int, int], tuple[Tensor, list[int]]] = {}
    for token in range(length):
        mine = token // size
        for group in range(groups):
            members = slice(group * heads // groups, (group + 1) * heads // groups)
            history = list(range(mine))
            logits = torch.stack([scores(token, group, entry) for entry in history]) if mine else q.new_zeros(0)
            if options.mode == "sparse":
                history = best(options, logits, coarse_blocks(options, q[token, members], k[:, group], token), mine)
            compared[token, group] = logits[history], history
            for entry in [*history, mine]:
                allowed[members, token, entry * size : (entry + 1) * size] = True
    out, p = document_attention(q, k, v, allowed & causal)
    divergence = torch.zeros(length, dtype=q.dtype)
    for (token, group), (logits, history) in compared.items():
        if history:
            of_group = p.detach()[group * heads // groups : (group + 1) * heads // groups, token]
            mass = torch.stack([of_group[:, e * size : (e + 1) * size].sum() for e in history])
            divergence[token] = divergence[token] + kl(mass / mass.sum(), logits) / groups
    return out, every_nth(divergence, options)


def token_scores(layer: Layer, x: Tensor, groups: int) -> Callable[[int, int, int], Tensor]:
    """The score of (a query's token, a group, one of its document's blocks)."""
    options = layer.kind.options
    own = layer.parameters
    width = options.index_dim
    index_heads = getattr(options, "index_heads", None)

    def normalised(y: Tensor, norm: Any) -> Tensor:
        if not hasattr(norm, "weight"):
            return y
        return norm.weight * y / (y.square().mean(-1, keepdim=True) + layer.model.norm_eps).sqrt()

    q = normalised((x @ own.q_proj.weight.T).unflatten(-1, (-1, width)), own.q_norm)
    k = normalised((x @ own.k_proj.weight.T).unflatten(-1, (groups, width)), own.k_norm)
    q, k = (rotated(layer, y, torch.arange(len(x))) for y in (q, k))
    q = q.unflatten(1, (groups, -1))

    def score(token: int, group: int, block: int) -> Tensor:
        mean = k[block * options.block_size : (block + 1) * options.block_size, group].mean(0)
        products = q[token, group] @ mean / math.sqrt(width)
        if index_heads is None:
            return products[0]
        weights = (own.weights.weight @ x[token]).unflatten(0, (groups, index_heads))[group]
        return weights @ products.clamp(min=0) / math.sqrt(index_heads)

    return score


def coarse_blocks(options: Any, q: Tensor, k: Tensor, token: int) -> list[int] | None:
    """Blocks in the larger blocks that MoBA's gate selects for the heads `q` of a token; None: all."""
    coarse = getattr(options, "coarse", None)
    if coarse is None:
        return None
    own = token // coarse.block_size
    means = [k[c * coarse.block_size : (c + 1) * coarse.block_size].mean(0) for c in range(own)]
    gates = torch.tensor([torch.inf if c in (0, own - 1) else (q @ means[c]).sum().item() for c in range(own)])
    each = coarse.block_size // options.block_size
    return [c * each + inside for c in [*chosen(gates, coarse.blocks - 1), own] for inside in range(each)]


def best(options: Any, logits: Tensor, candidates: list[int] | None, own: int) -> list[int]:
    """The blocks before its own that a query selects."""
    if candidates is None:
        candidates = list(range(own))
    candidates = sorted(block for block in candidates if block < own)
    first = getattr(options, "first_blocks", 0)
    local = getattr(options, "local_blocks", 1)
    forced = [block for block in candidates if block < first or block > own - local]
    assert len(forced) == len([block for block in range(own) if block < first or block > own - local])
    # Scores are equal, 0, where no product of an index head is positive: then the lower block id wins.
    ranked = [candidates[i] for i in logits[candidates].sort(descending=True, stable=True).indices]
    ranked = [*forced, *(block for block in ranked if block not in forced)][: options.topk - 1]
    if getattr(options, "top_p", None) is None:
        return ranked
    share = dict(zip(candidates, logits[candidates].softmax(-1).tolist(), strict=True))
    kept = forced
    while len(kept) < len(ranked) and sum(share[block] for block in kept) < options.top_p:
        kept = ranked[: len(kept) + 1]
    return kept


@each
def test_outputs_divergences_and_every_gradient_are_those_of_the_oracle(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 150)  # several chunks, of rows and of blocks
    layer = make_layer(name, options, LENGTHS)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["qsa", "indexer"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_other_groups_of_heads(name: str, kv_heads: int) -> None:
    model = ModelConfig(**(MODEL.model_dump() | {"kv_heads": kv_heads, "qk_norm": True}))
    options: dict[str, Any] = {"block_size": 5, "topk": 2, "index_dim": 8}
    if name == "indexer":
        options |= FREE | {"index_heads": 2, "coarse": {"block_size": 5, "blocks": 3}}
    layer = make_layer(name, options, [17, 4], model=model)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qsa", QSA | {"topk": 7, "mode": "warmup"}),
        ("qsa", QSA | {"topk": 7, "mode": "sparse"}),
        ("indexer", TWO_STAGES | {"topk": 14, "coarse": {"block_size": 6, "blocks": 5}}),
    ],
)
def test_with_every_block_it_is_full_attention(name: str, options: dict[str, Any]) -> None:
    layer = make_layer(name, options | {"train_gate": False}, LENGTHS)
    full = layer.with_inputs(layer.inputs(), kind=KINDS["full"](KINDS["full"].Options(), 8), parameters=None)
    got = results(layer, lambda layer: run_layer(layer)[:1])
    want = results(full)
    torch.testing.assert_close(got[0][0], want[0][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-12)


def test_a_later_token_changes_nothing_that_the_indexer_learns_before_it() -> None:
    """The mean of a query's own entry would hold tokens behind the query."""
    layer = make_layer(*CASES["qsa warmup"], [14])
    changed = [x.detach().clone() for x in layer.inputs()]
    for x in changed:
        x[13] += 1.0
    with torch.enable_grad():
        before = run_layer(layer)[1]
        after = run_layer(layer.with_inputs([x.requires_grad_() for x in changed]))[1]
    torch.testing.assert_close(before[:13], after[:13], rtol=0, atol=0)
    assert before[13] != after[13]


@pytest.mark.parametrize("case", ["qsa warmup", "heads warmup"])
def test_steps_along_the_gradient_bring_the_indexer_to_the_attention(case: str) -> None:
    assert_learns(make_layer(*CASES[case], LENGTHS))


@pytest.mark.parametrize("case", ["qsa sparse", "all"])
def test_compiled_layers_give_equal_numbers(case: str) -> None:
    layer = make_layer(*CASES[case], LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    torch.testing.assert_close(results(layer, compiled), results(layer), rtol=0, atol=1e-12)


def kind_with(name: str, options: dict[str, Any]) -> Any:
    return KINDS[name](KINDS[name].Options.model_validate(options), MODEL.head_width)


@each
def test_flops_are_those_of_the_products(name: str, options: dict[str, Any]) -> None:
    kind = kind_with(name, options)
    heads = MODEL.heads
    kv_heads = MODEL.kv_heads
    tokens = sum(LENGTHS)
    attended = kind.pairs(MODEL, LENGTHS)
    learns = options.get("train_gate", True)
    index_heads = options.get("index_heads", 1)
    of_pair = 2 * heads * MODEL.head_width
    width = options["index_dim"]
    weights = index_heads if "index_heads" in options else 0
    matrices = 2 * MODEL.hidden_size * kv_heads * (width * (index_heads + 1) + weights) * tokens
    scores = 2 * kv_heads * index_heads * width
    searched = float(sum(length**2 for length in LENGTHS)) / 2
    gate = 0.0
    if coarse := options.get("coarse"):
        moba = kind_with("moba", {"block_size": coarse["block_size"], "topk": coarse["blocks"]})
        searched = moba.pairs(MODEL, LENGTHS)
        gate = moba.flops(MODEL, LENGTHS) - 6 * of_pair * searched
    counted = 6 * of_pair * attended + gate + matrices * (1 + learns) + scores * searched / options["block_size"]
    if learns:
        counted += (of_pair * attended + 2 * scores * attended / options["block_size"]) / options.get("kl_every", 1)
    assert kind.flops(MODEL, LENGTHS) == pytest.approx(counted, rel=1e-12)


def test_two_stages_score_fewer_blocks_and_a_token_costs_the_same_at_any_length() -> None:
    """But for MoBA's gate, a product for every 512 tokens."""
    one, two = (
        kind_with("indexer", {"block_size": 1, "topk": 64, "train_gate": False, "coarse": coarse})
        for coarse in (None, {"block_size": 512, "blocks": 4})
    )
    per_token = [[kind.flops(MODEL, [n]) / n for n in (2**15, 2**20)] for kind in (one, two)]
    assert per_token[0][1] > 30 * per_token[0][0]
    assert per_token[1][1] < per_token[0][1] / 30


class Selections(Observer):
    """Keeps the selected blocks of the last call."""

    ids_HTC: Tensor

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        self.ids_HTC = selection[0]


def test_top_p_selects_more_blocks_where_attention_is_spread() -> None:
    """A share of nearly 1 selects as many as top-k, a small one a single block besides a query's own."""
    name, options = CASES["top-p"]

    def selected(top_p: float | None) -> Tensor:
        engine = OperatorEngine()
        with observing(engine, Selections()) as seen:
            run_layer(make_layer(name, options | {"top_p": top_p}, LENGTHS), engine)
        return (seen.ids_HTC >= 0).sum(-1)

    few, some, many, most = (selected(top_p) for top_p in (1e-6, 0.7, 1 - 1e-12, None))
    assert few.unique().tolist() == [0, 1]
    assert (few <= some).all()
    assert (some <= many).all()
    assert torch.equal(many, most)
    assert len(some.unique()) > 2


@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_what_is_kept_grows_with_the_tokens_not_with_their_square(mode: str) -> None:
    """Single tokens; of their ids, as many bytes as the plan counts, by group of heads."""
    options = {"block_size": 1, "topk": 17, "mode": mode}
    short, long = (kept_bytes(make_layer("indexer", options, [length])) for length in (128, 256))
    assert long == pytest.approx(2 * short, rel=0.05)
    kept = token_bytes(kind_with("indexer", options)).saved
    assert kept == (4 * MODEL.kv_heads * 16 if mode == "sparse" else 0)
    by_head = kind_with("indexer", options | {"backend": "composed"})  # in selections of MoBA's form, with their lists
    assert token_bytes(by_head).saved == 2 * 4 * MODEL.heads / (4 * MODEL.kv_heads) * kept


def test_export_is_refused_with_what_would_be_lost() -> None:
    size = MODEL.hidden_size * MODEL.kv_heads * ((2 + 1) * 6 + 2)
    problem = layer_problem(kind_with(*CASES["heads frozen"]), MODEL)
    assert problem.startswith(f"kind 'indexer' has {size} parameters in a layer")


@pytest.mark.parametrize(
    ("block_size", "topk", "backend", "own"),
    [(16, 128, "auto", True), (64, 32, "auto", False), (64, 200, "auto", True), (16, 128, "composed", False)],
)
def test_blocks_that_mobas_kernels_take_go_to_them(block_size: int, topk: int, backend: str, own: bool) -> None:
    options = {"block_size": block_size, "topk": topk, "backend": backend}
    kind = KINDS["indexer"](KINDS["indexer"].Options.model_validate(options), 64)
    assert kind.facts.own_kernels == own


def test_kernels_of_short_blocks_are_refused_where_they_cannot_run() -> None:
    options = {"block_size": 4, "topk": 12, "backend": "triton"}
    with pytest.raises(ValueError, match=r"attention\.indexer\.backend: given 'triton', which cannot run on cpu"):
        run_layer(make_layer("indexer", options, [40]))
    wide = MODEL.model_copy(update={"head_dim": 64})
    reasons = [
        next(KINDS["indexer"].problems(kind_with("indexer", options).options, StageContext(*context)))
        for context in ((wide, 64, 1, 1, False, "cpu", "here"), (MODEL, 64, 1, 1, False, "cuda", "here"))
    ]
    assert reasons == [
        "backend: given 'triton' here, which cannot run: the run trains on cpu, CUDA needed; set auto",
        "backend: given 'triton' here, which cannot run: head dim 8, one of 16, 32, 64, 128 needed; set auto",
    ]


def test_problems_name_the_option() -> None:
    context = StageContext(MODEL, 64, 1, 1, False, "cpu", layers="in layer 0")
    sizes = {"block_size": 4, "topk": 5, "local_blocks": 5, "coarse": {"block_size": 12, "blocks": 3}}
    assert list(KINDS["indexer"].problems(kind_with("indexer", sizes).options, context)) == [
        "topk: given 5 in layer 0, but first_blocks 1 and local_blocks 5 count towards it; allowed: at least 6",
        "coarse.block_size: given 12 in layer 0; allowed: a multiple of block_size 4 from 16, as one coarse block must "
        "hold the first_blocks, and two the local_blocks",
    ]
