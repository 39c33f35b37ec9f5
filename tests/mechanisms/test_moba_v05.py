"""MoBA's v0.5, self attention inside segments and a sublayer of cross attention: against loops in float64."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.attention.observer import Observer, observing
from moba_train.attention.operators import SAVED_OPERATORS
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.moba_v05 import MobaV05Kind
from moba_train.model.build import initialize_weights
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.model.transformer import Transformer
from moba_train.tools.convert.hf_export import layer_problem
from tests.attention.helpers import make_qkv
from tests.attention.kind_checks import (
    MODEL,
    RING_IN_PARTS,
    Layer,
    assert_ranks_equal_one_device,
    flat,
    in_16_bits,
    kept_bytes,
    make_layer,
    results,
    small_model,
    token_bytes,
)
from tests.attention.oracle import cut_blocks, history, select_blocks

LENGTHS = [12, 0, 1, 27]
SMALL = {"block_size": 4, "topk": 3}
KIND = MobaV05Kind


def own_segment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], block_size: int) -> torch.Tensor:
    """Causal attention inside each query's segment, query by query."""
    blocks = cut_blocks(lengths, block_size)
    rows = []
    for token in range(q.shape[0]):
        begin = blocks[history(lengths, block_size, token)[0]][0]
        rows.append(attended(q, k, v, token, slice(begin, token + 1)))
    return torch.stack(rows)


def earlier_segments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], block_size: int, topk: int
) -> torch.Tensor:
    """The sum, over the topk - 1 earlier segments whose mean key fits best, of attention to each."""
    blocks = cut_blocks(lengths, block_size)
    chosen = select_blocks(q, k, lengths, block_size=block_size, topk=topk)
    rows = []
    for token in range(q.shape[0]):
        heads = []
        for head in range(q.shape[1]):
            parts = [attended(q, k, v, token, slice(*blocks[block][:2]))[head] for block in chosen[head][token]]
            heads.append(sum(parts, torch.zeros_like(q[0, 0])))
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: int, seen: slice | list[int]) -> torch.Tensor:
    """Attention of one token with all heads, [H, d], to the keys `seen`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x[seen].repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("hd,shd->hs", q[token], keys) * q.shape[2] ** -0.5
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values)


def oracle(layer: Layer, lengths: list[int]) -> list[torch.Tensor]:
    """[self attention before its projection, update by the second sublayer for the residual stream x]."""
    rope = rope_cos_sin(layer.positions, layer.model.rope, 8)
    own = own_segment(apply_rope(layer.q, *rope), apply_rope(layer.k, *rope), layer.v, lengths, 4)
    p = layer.named_parameters()
    x = layer.x
    normed = x / (x.square().mean(-1, keepdim=True) + layer.model.norm_eps).sqrt() * p["norm.weight"]
    q, k, v = (F.linear(normed, p[f"{name}_proj.weight"], p.get(f"{name}_proj.bias")) for name in "qkv")
    q, k, v = (y.unflatten(1, (-1, 8)) for y in (q, k, v))
    if layer.model.qk_norm:
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + layer.model.norm_eps).sqrt() * p[f"{name}_norm.weight"]
            for name, y in (("q", q), ("k", k))
        )
    out = earlier_segments(apply_rope(q, *rope), apply_rope(k, *rope), v, lengths, 4, layer.kind.options.topk)
    return [own, out.flatten(1) @ p["o_proj.weight"].T]


@pytest.mark.parametrize("backend", ["reference", "composed"])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "qkv_bias": True}], ids=["plain", "norms and biases"])
def test_output_and_every_gradient_equal_the_loops(backend: str, changes: dict[str, Any]) -> None:
    layer = make_layer("moba_v05", {**SMALL, "backend": backend}, LENGTHS, model=MODEL.model_copy(update=changes))
    got, want = results(layer), results(layer, lambda layer: oracle(layer, LENGTHS))
    assert len(flat(got)) == 6 + 5 + (5 if changes else 0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
    assert all(x.any() for x in flat(want))


@pytest.mark.parametrize("backend", ["reference", "composed"])
def test_the_log_sum_exp_of_earlier_segments_is_that_of_all_their_keys(backend: str) -> None:
    """Run health shows the largest; -inf, not inf, for queries without an earlier segment."""
    kind = make_layer("moba_v05", {**SMALL, "backend": backend}, LENGTHS).kind
    q, k, v = (x.detach() for x in make_qkv(sum(LENGTHS), 4, 2, 8))
    _, lse = LOCAL_ENGINE(q, k, v, kind.earlier, packed_layout(LENGTHS))
    blocks, scores = cut_blocks(LENGTHS, 4), torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) * 8**-0.5
    want = torch.full_like(lse, -torch.inf)
    for head, of_tokens in enumerate(select_blocks(q, k, LENGTHS, block_size=4, topk=kind.options.topk)):
        for token, chosen in enumerate(of_tokens):
            keys = [scores[head, token, slice(*blocks[block][:2])] for block in chosen]
            if keys:
                want[head, token] = torch.cat(keys).logsumexp(0)
    assert lse.isfinite().any()
    torch.testing.assert_close(lse, want, rtol=0, atol=1e-12)


def test_a_ring_that_attends_to_parts_of_the_keys_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.cp_transport: 'ring' .* hierarchical or dispatch"):
        assert_ranks_equal_one_device(make_layer("moba_v05", SMALL, LENGTHS), RING_IN_PARTS)


def models(kind: str, options: dict[str, Any], **changes: Any) -> Transformer:
    """A float64 model of this kind with initial weights."""
    model = MODEL.model_copy(update=changes)
    modules = [{"moba_v05": KIND.parameters(KIND.Options(), model, layer)} for layer in range(model.layers)]
    transformer = Transformer(model, modules).double()
    initialize_weights(transformer, seed=1)
    transformer.set_attention([KINDS[kind](KINDS[kind].Options(**options), 8)] * model.layers)
    return transformer


def test_inserted_into_a_trained_model_it_only_takes_history_away() -> None:
    """Its output projection begins as zeros: the model is that of own segments, and learns what to add."""
    tokens, layout = torch.arange(40) % 50, packed_layout([28, 12])
    positions = torch.cat([torch.arange(28), torch.arange(12)])
    v05 = models("moba_v05", SMALL)
    logits = v05(tokens, positions, layout)
    assert torch.equal(logits, models("moba", {"block_size": 4, "topk": 1})(tokens, positions, layout))
    full = models("full", {})(tokens, positions, layout)
    torch.testing.assert_close(logits[:4], full[:4], rtol=0, atol=1e-12)
    assert (logits[4:28] - full[4:28]).abs().max() > 1e-3
    logits.square().sum().backward()
    first: Any = v05.blocks[0]
    cross = first.attention.moba_v05
    assert cross.o_proj.weight.grad.any()
    assert not cross.q_proj.weight.grad.any()


def test_compiled_and_recomputed_blocks_give_equal_numbers() -> None:
    """Activation checkpointing keeps both attentions' results."""
    model = small_model("moba_v05", SMALL)
    block = model.blocks[0]
    x, layout = torch.randn(40, 32, dtype=torch.float64, requires_grad=True), packed_layout(LENGTHS)
    rope = rope_cos_sin(layout.positions(layout.q_tokens, layout.q_documents), MODEL.rope, 8)
    calls = []

    class Count(Observer):
        def around(self, function: str) -> AbstractContextManager[None]:
            calls.append(function)
            return nullcontext()

    found = []
    contexts = partial(create_selective_checkpoint_contexts, list(SAVED_OPERATORS))
    recomputed = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    for forward in (block.forward, torch.compile(block.forward, backend="aot_eager"), recomputed):
        with observing(LOCAL_ENGINE, Count()):
            out, _ = forward(x, *rope, layout)
            found.append((out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(found[2], found[0], strict=True))
    assert calls.count("attend") == 3 * 2


def test_the_plan_counts_its_parameters_pairs_and_operations() -> None:
    options = KIND.Options(**SMALL)
    kind = KIND(options, 8)
    with torch.device("meta"):
        parameters = KIND.parameters(options, MODEL, 0)
    width, heads, kv = MODEL.hidden_size, MODEL.heads * 8, MODEL.kv_heads * 8
    matrices = width * (heads + 2 * kv) + heads * width
    assert sum(p.numel() for p in parameters.parameters()) == matrices + width
    # Pairs, one by one: own segment, its own key half; topk - 1 of the earlier ones.
    pairs = 0.0
    for length in LENGTHS:
        for token in range(length):
            pairs += token % 4 + 0.5 + 4 * min(2, token // 4)
    assert kind.pairs(MODEL, LENGTHS) == pairs
    gates = heads * sum(length * -(-length // 4) for length in LENGTHS)
    assert kind.flops(MODEL, LENGTHS) == 12 * heads * pairs + 6 * matrices * sum(LENGTHS) + gates
    assert token_bytes(kind).saved == 2 * (width + 2 * heads + 2 * kv) + 4 * 4 + 2 * 4 * 4 * 2
    assert f"{matrices + width} parameters" in layer_problem(kind, MODEL)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_saved_bytes_are_those_that_autograd_keeps(qk_norm: bool) -> None:
    """In 16 bits, beside full attention and the sublayer's input and output; plain PyTorch keeps no lists of the
    selected segments. Nothing is kept twice, nor what the backward pass makes anew."""
    model = MODEL.model_copy(update={"qk_norm": qk_norm})
    v05, full = in_16_bits(make_layer("moba_v05", SMALL, [256], model=model))
    outside = 2 * MODEL.hidden_size + 4 * MODEL.heads * (SMALL["topk"] - 1)
    update = 2 * MODEL.hidden_size
    own = kept_bytes(v05) - kept_bytes(full) - update * 256
    assert own == (token_bytes(v05.kind, model, seq_len=256).saved - outside) * 256


def test_options_that_cannot_work_are_named() -> None:
    context = StageContext(MODEL, 64, 1, 1, False, None, "in layer 0")
    assert list(KIND.problems(KIND.Options(**SMALL), context)) == []
    (problem,) = KIND.problems(KIND.Options(block_size=128), context)
    assert problem.startswith("block_size: given 128 in layer 0")
    assert list(KIND.problems(KIND.Options(block_size=128), replace(context, seq_len=128))) == []
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        KIND.Options(topk=1)
