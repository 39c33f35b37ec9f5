"""Full attention on the same weights, of every kind: it is what the kind computes once it leaves no key out."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.errors import UserError
from moba_train.evals.evaluation import full_attention, variants, with_full
from moba_train.mechanisms.distillation import DistillOptions
from moba_train.model.build import attention_of_new_tokens, build_attention
from moba_train.model.transformer import Transformer
from moba_train.tools.inference.cache import CachedAttention, CachePlan
from moba_train.tools.inference.generate import generate
from moba_train.tools.needle.full_answers import FullForSome, full_from
from tests.attention.kind_checks import Layer, make_layer, run_layer, small_model
from tests.mechanisms import test_infllm_v2

LENGTHS = [12, 0, 1, 53]
BLOCKS = {"block_size": 4, "topk": 2}
EVERY = {"topk": 14}
PARTS = [{"kind": "moba", "groups": [0]}, {"kind": "window", "groups": [1]}]


def groups(moba: dict[str, Any], window: int) -> dict[str, Any]:
    return {"parts": [part | {"options": own} for part, own in zip(PARTS, (moba, {"window": window}), strict=True)]}


SOFTMAX: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("full", {}, {}),
    **{name: (name, BLOCKS, EVERY) for name in ("moba", "seer", "msa", "qsa", "indexer", "oracle")},
    "moba, keys convolved": ("moba", BLOCKS | {"key_conv": 3}, EVERY),
    "moba_v1": ("moba_v1", BLOCKS | {"merge": "softmax", "key_conv": 3}, EVERY),
    "moba_window": ("moba_window", BLOCKS | {"window": 4, "key_conv": 5}, EVERY),
    "infllm_v2": ("infllm_v2", test_infllm_v2.SIZES, {"topk": 8}),
    "infllm": ("infllm", BLOCKS | {"window": 4, "representatives": 2}, {"window": 73}),
    "moa": ("moa", {"alpha": 4, "beta": 0, "sink_tokens": 0, "block_size": 4, "max_length": 256}, {"beta": 1}),
    "window": ("window", {"window": 5, "sinks": 1}, {"window": 53}),
    "capped": ("capped", {"cap": 0.7, "window": 5}, {"window": None}),
    "by_group": ("by_group", groups(BLOCKS | {"key_conv": 3}, 5), groups(BLOCKS | EVERY | {"key_conv": 3}, 53)),
}
"""Kind, options, and what to change in these so that no key is left out."""
WITHOUT_SOFTMAX: dict[str, dict[str, Any]] = {"lightning": {}, "kda": {}, "gdn": {}}
WITHOUT_FULL: dict[str, dict[str, Any]] = {"nsa": {}, "moba_v05": {}, "moba_v1": {"merge": "gate"}}


def layer_of(kind: str, options: dict[str, Any]) -> LayerAttention:
    return LayerAttention(kind, KINDS[kind].Options.model_validate(options))


def made(*layer: Any) -> LayerAttention:
    """Full attention of a kind with these options, which has one."""
    (found,) = full_attention((layer_of(*layer),)) or ()
    return found


def test_each_kind_is_in_one_of_the_tables() -> None:
    assert {kind for kind, _, _ in SOFTMAX.values()} | {*WITHOUT_SOFTMAX, *WITHOUT_FULL} == {*KINDS.usable()}


@torch.no_grad()
@pytest.mark.parametrize("case", SOFTMAX)
def test_it_is_the_kind_that_leaves_no_key_out(case: str) -> None:
    """On the same weights, which are random, in float64."""
    kind, options, everything = SOFTMAX[case]
    layer = make_layer(kind, options, LENGTHS)
    full = made(kind, options)
    (want,) = run_layer(layer.with_inputs(layer.inputs(), kind=made_kind(layer_of(kind, options | everything))))[:1]
    (got,) = run_layer(layer.with_inputs(layer.inputs(), kind=made_kind(full)))[:1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    if everything:
        assert not torch.allclose(run_layer(layer)[0], want, atol=1e-3)


def made_kind(layer: LayerAttention) -> Any:
    (kind,) = build_attention([layer], 8)
    return kind


@torch.no_grad()
@pytest.mark.parametrize("case", SOFTMAX)
def test_new_tokens_and_answers_attend_to_all_keys_but_in_windows(case: str) -> None:
    """`decode: full` and `answer: full`; the prompt and the text are read by the kind itself."""
    kind, options, _ = SOFTMAX[case]
    layer = make_layer(kind, options, [30])
    full = layer_of(kind, options).full(keep_windows=True)
    assert full is not None
    (own,) = run_layer(layer)[:1]
    (want,) = run_layer(layer.with_inputs(layer.inputs(), kind=made_kind(full)))[:1]

    answers = FullForSome(layer.kind, made_kind(full), lambda tokens_n: tokens_n >= 24)
    (got,) = run_layer(layer.with_inputs(layer.inputs(), kind=answers))[:1]
    torch.testing.assert_close(got, torch.cat([own[:24], want[24:]]), rtol=0, atol=1e-12)

    for decoded in (layer.kind, answers):
        plan = CachePlan([30], torch.device("cpu"))
        engine = CachedAttention(plan, "full", decoded)
        plan.read(0, 24)
        parts = [run_layer(part_of(layer, 0, 24, plan, decoded), engine)[0]]
        for token in range(24, 30):
            plan.decode([0])
            parts.append(run_layer(part_of(layer, token, token + 1, plan, decoded), engine)[0])
        torch.testing.assert_close(torch.cat(parts), torch.cat([own[:24], want[24:]]), rtol=0, atol=1e-11)


def part_of(layer: Layer, start: int, stop: int, plan: CachePlan, kind: Any) -> Layer:
    """The layer of these tokens."""
    return layer.with_inputs((x[start:stop] for x in layer.inputs()), layout=plan.layout, kind=kind)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("case", SOFTMAX)
def test_it_is_its_own_full_attention_and_has_the_weights_of_the_kind_or_none(case: str, windows: bool) -> None:
    kind, options, _ = SOFTMAX[case]
    own = layer_of(kind, options)
    full = own.full(windows)
    assert full is not None
    assert full.full(windows) == full
    if full.kind != "full":
        assert full.kind == kind
        weights = [
            {name: value.shape for name, value in make_layer(kind, dict(one.options), [3]).named_parameters().items()}
            for one in (own, full)
        ]
        assert weights[0] == weights[1]
    assert (full == own) == (case == "full" or (windows and case in ("window", "capped")))


@pytest.mark.parametrize("kind", WITHOUT_SOFTMAX)
def test_a_kind_without_softmax_is_its_own(kind: str) -> None:
    own = layer_of(kind, {})
    assert own.full() == own
    assert variants((own,), (own,), "both") == variants((own,), (own,), "full") == {kind: (own,)}


@pytest.mark.parametrize("kind", WITHOUT_FULL)
def test_kinds_that_have_none_are_refused_and_left_alone_by_both(kind: str) -> None:
    layers = layer_of(kind, WITHOUT_FULL[kind]), layer_of("full", {})
    assert full_attention(layers) is None
    assert with_full(layers) == variants(layers, layers, "both") == {kind: layers}
    with pytest.raises(UserError, match=f"--attention: given full, but layers of {kind} have no full attention on the"):
        variants(layers, layers, "full")
    assert attention_of_new_tokens(made_kind(layers[0])) is None
    # A checkpoint of a stage with full attention, before one with the kind.
    stage = (layer_of("full", {}),) * 2
    assert variants(stage, layers, "full") == {"full": stage}
    assert variants(stage, layers, "both") == {kind: layers, "full": stage}


def gemma() -> tuple[Transformer, tuple[LayerAttention, LayerAttention]]:
    """A model of a layer with capped scores in a window, and one without a window."""
    layers = layer_of("capped", {"cap": 0.3, "window": 5}), layer_of("capped", {"cap": 0.3})
    model = small_model("capped", {"cap": 0.3})
    model.set_attention(build_attention(layers, model.config.head_width))
    return model, layers


@torch.no_grad()
def test_capped_scores_stay_below_their_cap() -> None:
    """Evaluations, teachers, answers and new tokens take it in the layers' place."""
    model, (near, far) = gemma()
    assert with_full((near, far)) == {"capped": (near, far), "full": (far, far)}
    assert variants((far, far), (far, far), "full") == {"capped": (far, far)}
    assert [DistillOptions().teacher_of(layer) for layer in (near, far)] == [far, far]
    assert [DistillOptions(teacher="full_and_windows").teacher_of(layer) for layer in (near, far)] == [near, far]

    prompt = torch.randint(50, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    own = logits(model, prompt)
    with full_from(model, 10):
        torch.testing.assert_close(logits(model, prompt), own, rtol=0, atol=0)
    greedy = [*generate(model, prompt, 8, temperature=0, decode="own")]
    assert [*generate(model, prompt, 8, temperature=0, decode="full")] == greedy
    model.set_attention(build_attention([layer_of("window", {"window": 5}), layer_of("full", {})], 8))
    assert not torch.allclose(logits(model, prompt), own, atol=1e-2), "the cap must matter"


def logits(model: Transformer, tokens: list[int]) -> Tensor:
    found: Tensor = model(torch.tensor(tokens), torch.arange(len(tokens)), packed_layout([len(tokens)]))
    return found
