"""SeerAttention and MiniMax Sparse Attention against oracles in float64 that follow the papers document by document,
head by head: outputs, KL divergences and every gradient; ranks that share a sequence; decoding; what plans count."""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.attention.observer import observing
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import grid
from moba_train.mechanisms.gates.grid import causal_chunks
from moba_train.mechanisms.probes.gate_probe import LayerProbe
from moba_train.mechanisms.probes.gate_statistics import GateStatistics
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.data_shard import DataShard
from moba_train.tools.convert.hf_export import layer_problem
from moba_train.tools.inference.cache import CachedAttention, CachePlan
from moba_train.tools.inference.generate import generate
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    CountingEngine,
    Layer,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    run_layer,
    small_model,
    token_bytes,
)
from tests.thread_ranks import thread_transports

BLOCK = 4
LENGTHS = [12, 0, 1, 27]
SEER = {"block_size": BLOCK, "topk": 3}
MSA = {"block_size": BLOCK, "topk": 3, "index_dim": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seer warmup": ("seer", SEER | {"mode": "warmup"}),
    "seer sparse": ("seer", SEER | {"train_gate": True, "kl_weight": 0.5}),
    "seer frozen": ("seer", SEER),
    "seer threshold": ("seer", SEER | {"topk": 5, "threshold": 0.2}),
    "msa warmup": ("msa", MSA | {"mode": "warmup", "kl_weight": 0.5}),
    "msa sparse": ("msa", MSA),
    "msa frozen": ("msa", MSA | {"train_gate": False}),
    "msa, keys of groups, warmup": ("msa", MSA | {"index_keys": "group", "mode": "warmup", "kl_weight": 0.5}),
    "msa, keys of groups": ("msa", MSA | {"index_keys": "group"}),
    "seer, every second block": ("seer", SEER | {"train_gate": True, "kl_every": 2}),
    "msa warmup, every third query": ("msa", MSA | {"mode": "warmup", "kl_weight": 0.5, "kl_every": 3}),
    "msa, keys of groups, every third query": ("msa", MSA | {"index_keys": "group", "kl_every": 3}),
}
each = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)


def rotated(layer: Layer, x: Tensor, positions: Tensor) -> Tensor:
    return apply_rope(x, *rope_cos_sin(positions, layer.model.rope, x.shape[-1]))


def document_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """(output [t, H, d], probabilities [H, t, t]) of one document under a mask [H, t, t]."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, v.repeat_interleave(group, 1)), p


def kl(target: Tensor, logits: Tensor) -> Tensor:
    """Divergence of two distributions over a few blocks."""
    return (target * (target.clamp(min=1e-300).log() - logits.log_softmax(-1))).sum()


def chosen(scores: Tensor, count: int) -> list[int]:
    """The blocks of the history with the highest scores."""
    return scores.topk(min(count, len(scores))).indices.tolist()


def oracle(layer: Layer) -> list[Tensor]:
    """Output and, where the gate learns, the divergence of each token times its weight."""
    options = layer.kind.options
    own = {"seer": seer_document, "msa": msa_document}[layer.kind.name]
    outputs, divergences = [], []
    first = 0
    for length in [n for n in layer.layout.cu_seqlens.diff().tolist() if n]:
        rows = slice(first, first + length)
        first += length
        out, divergence = own(layer, *(x[rows] for x in layer.inputs()))
        outputs.append(out)
        divergences.append(every_nth(divergence, options, options.block_size if layer.kind.name == "seer" else 1))
    learns = options.mode == "warmup" or options.train_gate
    return [torch.cat(outputs), options.kl_weight * torch.cat(divergences)] if learns else [torch.cat(outputs)]


def every_nth(divergence: Tensor, options: Any, unit: int = 1) -> Tensor:
    """The divergence of one of each `kl_every` queries, or runs of `unit`, counted as many times: the middle one at
    first, then one further each time."""
    every = options.kl_every
    chosen = [N * every + (N + every // 2) % every for N in range(len(divergence))]
    return divergence * every * torch.isin(torch.arange(len(divergence)) // unit, torch.tensor(chosen))


def seer_document(layer: Layer, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    options = layer.kind.options
    length, heads, _ = q.shape
    group = heads // k.shape[1]
    size = options.block_size
    starts = list(range(0, length, size))
    pooled_q = torch.stack([q.detach()[s : s + size].mean(0) for s in starts])
    pooled_k = torch.stack(
        [torch.cat([b.mean(0), b.amax(0), b.amin(0)], -1) for b in (k.detach()[s : s + size] for s in starts)]
    )
    q_gate = torch.stack([pooled_q[:, h] @ layer.parameters.q_weight[h] for h in range(heads)], 1)
    k_gate = torch.stack([pooled_k[:, g] @ layer.parameters.k_weight[g] for g in range(k.shape[1])], 1)
    q_gate, k_gate = (rotated(layer, gate, torch.tensor(starts)) for gate in (q_gate, k_gate))
    positions = torch.arange(length)
    q, k = rotated(layer, q, positions), rotated(layer, k, positions)
    causal = (positions[:, None] >= positions[None, :]).expand(heads, -1, -1)
    out, p = document_attention(q, k, v, causal)
    allowed = torch.zeros_like(causal)
    divergence = torch.zeros(length, dtype=q.dtype)
    for block, start in enumerate(starts):
        mine = slice(start, start + size)
        for head in range(heads):
            logits = k_gate[: block + 1, head // group] @ q_gate[block, head] / math.sqrt(q_gate.shape[-1])
            largest = torch.stack([p[head, mine, s : s + size].max() for s in starts[: block + 1]]).detach()
            divergence[mine] = divergence[mine] + kl(largest / largest.sum(), logits) / heads
            history = chosen(logits[:block], options.topk - 1)
            if options.threshold is not None:
                history = [other for other in history if logits.softmax(-1)[other] > options.threshold]
            for other in [*history, block]:
                allowed[head, mine, starts[other] : starts[other] + size] = True
    if options.mode == "sparse":
        out, _ = document_attention(q, k, v, allowed & causal)
    return out, divergence


def msa_document(layer: Layer, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    options = layer.kind.options
    length, heads, _ = q.shape
    groups = k.shape[1]
    size = options.block_size
    positions = torch.arange(length)
    weight_q, weight_k = layer.parameters.q_proj.weight, layer.parameters.k_proj.weight
    q_index = rotated(layer, (x.detach() @ weight_q.T).unflatten(-1, (groups, -1)), positions)
    k_index = rotated(layer, (x.detach() @ weight_k.T).unflatten(-1, (-1, q_index.shape[-1])), positions)
    k_index = k_index.expand(-1, groups, -1)
    q, k = rotated(layer, q, positions), rotated(layer, k, positions)
    causal = (positions[:, None] >= positions[None, :]).expand(heads, -1, -1)
    allowed = torch.zeros_like(causal)
    scores: dict[tuple[int, int], Tensor] = {}
    covered: dict[tuple[int, int], list[int]] = {}
    for token in range(length):
        own = token // size
        for group in range(groups):
            tokens = k_index[: token + 1, group] @ q_index[token, group] / math.sqrt(q_index.shape[-1])
            logits = torch.stack([part.max(-1).values for part in tokens.split(size)])
            history = chosen(logits[:own], options.topk - 1) if options.mode == "sparse" else list(range(own))
            scores[token, group], covered[token, group] = logits, [*history, own]
            for block in covered[token, group]:
                heads_of = slice(group * heads // groups, (group + 1) * heads // groups)
                allowed[heads_of, token, block * size : (block + 1) * size] = True
    out, p = document_attention(q, k, v, allowed & causal)
    divergence = torch.zeros(length, dtype=q.dtype)
    for (token, group), blocks in covered.items():
        of_group = p.detach()[group * heads // groups : (group + 1) * heads // groups, token]
        mass = torch.stack([of_group[:, b * size : (b + 1) * size].sum(-1).mean() for b in blocks])
        divergence[token] = divergence[token] + kl(mass, scores[token, group][blocks]) / groups
    return out, divergence


@each
def test_outputs_divergences_and_every_gradient_are_those_of_the_oracle(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 150)  # several chunks, of rows and of blocks
    layer = make_layer(name, options, LENGTHS)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", ["seer", "msa"])
def test_other_groups_of_heads(name: str, kv_heads: int) -> None:
    model = ModelConfig(**(MODEL.model_dump() | {"kv_heads": kv_heads}))
    layer = make_layer(name, {"block_size": 5, "topk": 2, "train_gate": True}, [17, 4], model=model)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["seer", "msa", "qsa"])
def test_a_document_may_have_no_query_that_counts(name: str) -> None:
    layer = make_layer(name, {"block_size": BLOCK, "topk": 3, "train_gate": True, "kl_every": 100}, LENGTHS)
    (_, divergence), _, parameters = results(layer)
    assert not any(x.any() for x in (divergence, *parameters.values()))


def test_what_follows_from_a_layout_is_made_once() -> None:
    layout = packed_layout([30])
    assert grid.block_grid(layout, 4) is grid.block_grid(layout, 4, 1)
    assert grid.query_rows(layout, 4) is grid.query_rows(layout, 4, 1)


def test_queries_that_count_lie_at_all_places_of_a_block() -> None:
    """As often at each, though the block is a divisor of N."""
    places = grid.block_grid(packed_layout([256]), 4, 8).tokens_n % 4
    assert places.bincount().tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("name", ["seer", "msa"])
@pytest.mark.parametrize("mode", ["warmup", "sparse"])
def test_with_every_block_it_is_full_attention(name: str, mode: str) -> None:
    layer = make_layer(name, {"block_size": BLOCK, "topk": 7, "mode": mode, "train_gate": False}, LENGTHS)
    full = layer.with_inputs(layer.inputs(), kind=KINDS["full"](KINDS["full"].Options(), 8), parameters=None)
    got, want = results(layer, lambda layer: run_layer(layer)[:1]), results(full)
    torch.testing.assert_close(got[0][0], want[0][0], rtol=0, atol=0 if mode == "warmup" else 1e-12)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-12)


@each
def test_the_gate_learns_from_the_divergence_alone_and_nothing_else_does(name: str, options: dict[str, Any]) -> None:
    layer = make_layer(name, options, LENGTHS)
    outputs = run_layer(layer)
    gate = list(layer.named_parameters().values())
    assert all(g is None for g in torch.autograd.grad(outputs[0].sum(), gate, allow_unused=True, retain_graph=True))
    if len(outputs) == 2:
        grads = torch.autograd.grad(outputs[1].sum(), [*layer.inputs(), *gate], allow_unused=True)
        assert all(g is None or not g.any() for g in grads[:4])
        assert all(g is not None and g.any() for g in grads[4:])


@pytest.mark.parametrize("case", ["seer warmup", "seer sparse", "msa warmup", "msa sparse"])
def test_steps_along_the_gradient_bring_the_gate_to_the_attention(case: str) -> None:
    assert_learns(make_layer(*CASES[case], LENGTHS))


def assert_learns(layer: Layer) -> None:
    """Adam lowers the layer's auxiliary loss."""
    optimizer = torch.optim.Adam(layer.parameters.parameters(), lr=0.03)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = run_layer(layer)[1].mean()
        loss.backward(inputs=list(layer.parameters.parameters()))
        optimizer.step()
        losses.append(loss.item())
    assert 0 < losses[-1] < 0.6 * losses[0]


@torch.no_grad()
def test_sparse_seer_reads_prompts_and_decodes_with_full_attention_only() -> None:
    """A prompt in parts of whole blocks gives what one pass gives; new tokens attend to everything."""
    model = small_model(*CASES["seer frozen"])
    prompt = torch.arange(1, 30)
    want = model(prompt, torch.arange(29), packed_layout([29]))
    plan = CachePlan([40], torch.device("cpu"))
    model.set_engines([CachedAttention(plan, "full", kind) for kind in model.attention_kinds()])
    for part in (slice(0, 12), slice(12, 20), slice(20, 29)):
        plan.read(0, part.stop - part.start)
        got = model(prompt[part], torch.arange(29)[part], plan.layout)
        torch.testing.assert_close(got, want[part], rtol=0, atol=1e-10)
    full = small_model("seer", SEER | {"mode": "warmup"})
    assert len(list(generate(model, prompt.tolist(), 5, temperature=0.0))) == 5
    with pytest.raises(
        ValueError, match=r"decode: own given, but attention\.seer\.mode 'sparse' selects from the mean"
    ):
        list(generate(model, [1, 2, 3], 2, decode="own"))
    assert list(generate(full, prompt.tolist(), 5, temperature=0.0, decode="own"))


@torch.no_grad()
def test_full_decoding_of_msa_attends_to_everything() -> None:
    """Prompt with the blocks of the index, then new tokens with all: the answer of another second half."""
    options = {**CASES["msa sparse"][1], "topk": 1}
    model = small_model("msa", options)
    prompt = list(range(1, 30))
    own, full = ("".join(map(chr, generate(model, prompt, 12, temperature=0.0, decode=d))) for d in ("own", "full"))
    assert own != full


@pytest.mark.parametrize("name", ["seer", "msa"])
def test_compiled_layers_give_equal_numbers(name: str) -> None:
    layer = make_layer(name, {"block_size": BLOCK, "topk": 3, "train_gate": True, "kl_every": 2}, LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    torch.testing.assert_close(results(layer, compiled), results(layer), rtol=0, atol=1e-12)


@each
def test_attended_pairs_are_those_of_a_count(name: str, options: dict[str, Any]) -> None:
    """With a threshold, which selects fewer blocks, an upper bound."""
    kind = KINDS[name](KINDS[name].Options(**options), 8)
    counted = 0.0
    for length in LENGTHS:
        for token in range(length):
            own = token // BLOCK
            history = own if options.get("mode") == "warmup" else min(own, options["topk"] - 1)
            counted += history * BLOCK + token % BLOCK + 0.5
    assert kind.pairs(MODEL, LENGTHS) == counted


@each
def test_flops_are_those_of_the_products(name: str, options: dict[str, Any]) -> None:
    """2 for each multiplication of a matrix product, and as many for the gradient of a factor that learns."""
    kind = KINDS[name](KINDS[name].Options(**options), MODEL.head_width)
    heads, kv_heads, tokens = MODEL.heads, MODEL.kv_heads, sum(LENGTHS)
    learns = options.get("mode") == "warmup" or options.get("train_gate", name == "msa")
    full_pairs, attended = sum(length**2 for length in LENGTHS) / 2, kind.pairs(MODEL, LENGTHS)
    of_pair = 2 * heads * MODEL.head_width  # one product of q and k
    every, sparse = options.get("kl_every", 1), options.get("mode") != "warmup"
    counted = 6 * of_pair * attended
    if name == "seer":
        blocks = [-(-length // BLOCK) for length in LENGTHS]
        matrices = 2 * (heads + 3 * kv_heads) * MODEL.head_width**2 * sum(blocks)
        scores = 2 * heads * MODEL.head_width * sum(count**2 for count in blocks) / 2
        counted += matrices + scores * sparse
        if learns:
            counted += matrices + ((2 if sparse else 3) * scores + of_pair * full_pairs) / every
        if learns and sparse:  # full attention besides, for its map
            counted += 2 * of_pair * full_pairs
    else:
        keys = kv_heads if options.get("index_keys") == "group" else 1
        matrices = 2 * MODEL.hidden_size * (kv_heads + keys) * 6 * tokens
        scores = 2 * kv_heads * 6
        counted += matrices + scores * full_pairs / (1 if sparse else every)
        if learns:  # a block's score is that of one token
            counted += matrices + (of_pair * attended + 2 * scores * attended / BLOCK) / every
    assert kind.flops(MODEL, LENGTHS) == pytest.approx(counted, rel=1e-12)


@each
def test_saved_bytes_are_those_of_the_selected_blocks_and_the_target(name: str, options: dict[str, Any]) -> None:
    kind = KINDS[name](KINDS[name].Options(**options), MODEL.head_width)
    learns = options.get("mode") == "warmup" or options.get("train_gate", name == "msa")
    sparse = options.get("mode") != "warmup"
    selected = 2 * 4 * MODEL.heads * (options["topk"] - 1) if sparse else 0
    target = 4 * MODEL.heads * 16 // (BLOCK * options.get("kl_every", 1)) if learns and name == "seer" else 0
    assert token_bytes(kind).saved == selected + target


def test_what_msa_keeps_of_other_ranks_in_its_warm_up_is_what_it_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[CountingEngine] = []

    def begin_and_keep(engine: CountingEngine, *arguments: Any) -> None:
        begin(engine, *arguments)
        engines.append(engine)

    begin = CountingEngine.__init__
    monkeypatch.setattr(CountingEngine, "__init__", begin_and_keep)
    layer = make_layer(*CASES["msa warmup"], LENGTHS)
    assert_ranks_equal_one_device(layer, STRATEGIES[1])
    planned, alone = (token_bytes(layer.kind, width=8, tokens=10, cp=cp).activations for cp in (STRATEGIES[1].ranks, 1))
    assert {(STRATEGIES[1].ranks - 1) * engine.gathered for engine in engines} == {planned - alone}


@each
def test_export_is_refused_with_what_would_be_lost(name: str, options: dict[str, Any]) -> None:
    kind = KINDS[name](KINDS[name].Options(**options), MODEL.head_width)
    heads = 4 if "index_keys" in options else 3
    size = {"seer": 8 * 8 * (4 + 3 * 2), "msa": 6 * MODEL.hidden_size * heads}[name]
    assert layer_problem(kind, MODEL).startswith(f"kind {name!r} has {size} parameters in a layer")


@pytest.mark.parametrize("case", ["seer sparse", "msa sparse", "seer warmup", "msa warmup"])
def test_bfloat16_layers_have_a_float32_divergence(case: str) -> None:
    layer = make_layer(*CASES[case], LENGTHS)
    want = run_layer(layer)[1]
    inputs = [x.detach().bfloat16().requires_grad_() for x in layer.inputs()]
    half = layer.with_inputs(inputs, parameters=copy.deepcopy(layer.parameters).bfloat16())
    out, divergence = run_layer(half)
    assert out.dtype == torch.bfloat16
    assert divergence.dtype == torch.float32
    assert divergence.mean().item() == pytest.approx(want.mean().item(), rel=0.15)
    (out.sum() + divergence.sum()).backward()
    assert {p.grad.dtype for p in half.parameters.parameters()} == {torch.bfloat16}


def test_problems_name_the_option() -> None:
    context = StageContext(MODEL, 64, 1, 1, False, "cpu", layers="in layer 0")
    for name in ("seer", "msa"):
        options = KINDS[name].Options.model_validate({"block_size": 128, "backend": "triton"})
        problems = list(KINDS[name].problems(options, context))
        assert problems[0].startswith("block_size: given 128 in layer 0, which does not fit")
        assert problems[1].startswith("backend: given 'triton' in layer 0, which cannot run")
        assert not list(KINDS[name].problems(KINDS[name].Options.model_validate({"block_size": 16}), context))


@pytest.mark.parametrize(("name", "most"), [("seer", 7), ("msa", 127), ("qsa", 127)])
def test_a_divergence_of_no_query_is_refused(name: str, most: int) -> None:
    context = StageContext(MODEL, 64, 1, 1, False, "cpu", layers="in layer 0")

    def problems(**options: Any) -> list[str]:
        kind = KINDS[name]
        given = {"block_size": 16, "train_gate": True} | options
        return list(kind.problems(kind.Options.model_validate(given), context))

    (problem,) = problems(kl_every=most + 1)
    assert problem.startswith(f"kl_every: given {most + 1} in layer 0, with which no query of a sequence of 64 tokens")
    assert problem.endswith(f"at most {most}")
    assert not problems(kl_every=most)
    assert not problems(kl_every=most + 1, train_gate=False)
    layer = make_layer(name, {"block_size": 16, "topk": 4, "train_gate": True, "kl_every": most}, [64])
    assert run_layer(layer)[1].any()


def test_index_heads_are_normalised_where_the_model_normalises_q_and_k() -> None:
    model = ModelConfig(**(MODEL.model_dump() | {"qk_norm": True}))
    module: Any = KINDS["msa"].parameters(KINDS["msa"].Options(), model, 0)
    module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    q, k = module(torch.randn(5, model.hidden_size, dtype=torch.float64))
    assert {name for name, _ in module.named_parameters() if "norm" in name} == {"q_norm.weight", "k_norm.weight"}
    for x in (q, k):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(x.shape[:2], dtype=torch.float64), rtol=0, atol=1e-3)


def test_chunks_cover_what_queries_see_with_bounded_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grid._SCORES_PER_CHUNK, "cpu", 60)
    layout = packed_layout([30, 2, 0, 50])
    blocks = grid.block_grid(layout, BLOCK)
    end = 0
    for queries, seen in causal_chunks(blocks.own_on_host, blocks.first_on_host, 3, torch.device("cpu")):
        assert queries.start == end
        end = queries.stop
        rows = queries.stop - queries.start
        assert rows == 1 or rows * (seen.stop - seen.start) * 3 <= 60
        assert seen.start <= int(blocks.first_n[queries].min())
        assert seen.stop > int(blocks.own_n[queries].max())
    assert end == 82


@torch.no_grad()
@pytest.mark.parametrize("name", ["seer", "msa"])
@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_what_a_distilled_gate_would_select_is_seen_in_its_warm_up_on_any_ranks(
    name: str, strategy: CPStrategy
) -> None:
    """The blocks that mode sparse attends to; sampled queries that are spread over ranks give one device's numbers."""
    warm_up, sparse = (
        make_layer(name, {"block_size": 8, "topk": 3, "mode": mode}, [61, 30, 5]) for mode in ("warmup", "sparse")
    )
    sample = [7, 30, 31, 44, 60, 61, 85, 89, 90]
    alone = observed(warm_up, LOCAL_ENGINE, DataShard(), sample)
    assert 0 < alone.means()["block_recall"] < 1
    assert observed(sparse, LOCAL_ENGINE, DataShard(), sample).vector() == alone.vector()

    transports, _ = thread_transports(strategy)
    engines = [ContextParallel(strategy, transport) for transport in transports]
    sequence = engines[0].sequence(warm_up.layout.total)

    def rank(engine: ContextParallel) -> GateStatistics:
        with torch.no_grad():
            mine = [sequence.shard(x, engine.rank) for x in warm_up.inputs()]
            layer = warm_up.with_inputs(mine)
            positions = sequence.shard(warm_up.positions, engine.rank)
            return observed(layer, engine, DataShard(engine=engine), sample, positions)

    with ThreadPoolExecutor(strategy.ranks) as pool:
        first, *others = pool.map(rank, engines)
    assert first.vector() == pytest.approx(alone.vector(), rel=1e-9)
    assert not any(other.means() for other in others)


def observed(
    layer: Layer, engine: Engine, shard: DataShard, sample: list[int], positions: Tensor | None = None
) -> GateStatistics:
    """The statistics of what the layer's kind selects for the sampled queries."""
    looking = LayerProbe(shard, layer.model.heads)
    looking.tokens = sample
    with observing(engine, looking):
        run_layer(layer, engine, positions)
    return looking.found
