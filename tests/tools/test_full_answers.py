"""Answers with full attention after a text that was read with the layers' own: which rows attend to what."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.layout import packed_layout
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.model.block import Block
from moba_train.model.build import build_attention, build_model, initialize_weights
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.model.spec import model_spec
from moba_train.model.transformer import Transformer
from moba_train.tools.inference.generate import generate
from moba_train.tools.needle.full_answers import full_from
from moba_train.tools.needle.needle import Needle
from moba_train.tools.tasks.ruler import Ruler, RulerConfig
from tests.evals.setting import built, stage_setting
from tests.resolved import check, stages_of
from tests.tools.questions import VOCAB, context, recipe, recipe_texts

LENGTH = 448
FIRST = 300


def made(folder: Path, topk: int = 3, **evaluation: Any) -> tuple[RunConfig, Transformer]:
    """A recipe of two layers with MoBA and one with full attention, and its model in float64."""
    moba = {"block_size": 16, "topk": topk, "backend": "reference"}
    config = recipe(folder, LENGTH, evaluation, attention={"full_layers": "last:1", "moba": moba})
    model = Transformer(config.model).double()
    initialize_weights(model, seed=0)
    set_attention(config, model)
    return config, model


def set_attention(config: RunConfig, model: Transformer) -> None:
    (stage,) = stages_of(config)
    model.set_attention(build_attention(stage.attention, config.model.head_width))


def hidden(model: Transformer) -> Tensor:
    tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    found, _ = model.hidden(tokens, torch.arange(LENGTH), packed_layout([LENGTH]))
    return found.detach()


def by_definition(config: RunConfig, model: Transformer) -> Tensor:
    """Residual stream with the rows from `FIRST` on as softmax over all keys before them."""
    tokens = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    layout = packed_layout([LENGTH])
    cos, sin = rope_cos_sin(torch.arange(LENGTH), config.model.rope, config.model.head_width)
    x = model.embedding(tokens)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for block in (cast(Block, block) for block in model.blocks):
        attention = block.attention
        normed = block.attention_norm(x)
        q, k, v = (
            projection(normed).unflatten(-1, (-1, config.model.head_width))
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (apply_rope(each, cos, sin) for each in (q, k))
        assert attention.kind is not None
        (own,) = attention.kind.attentions
        out, _ = LOCAL_ENGINE(q, k, v, own, layout)
        keys, values = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, keys) * config.model.head_width**-0.5
        dense = torch.einsum("hts,shd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), values)
        x = x + attention.o_proj(torch.cat([out[:FIRST], dense[FIRST:]]).flatten(1))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    return model.norm(x).detach()


def test_the_texts_rows_are_the_own_attentions_and_the_answers_rows_attend_to_all_keys(texts: Path) -> None:
    config, model = made(texts)
    own = hidden(model)
    with full_from(model, FIRST):
        found = hidden(model)
    assert torch.equal(found[:FIRST], own[:FIRST])
    assert torch.allclose(found, by_definition(config, model), atol=1e-10)
    assert not torch.allclose(found[FIRST:], own[FIRST:], atol=1e-3)
    assert torch.equal(hidden(model), own), "the layers have their own attention again"


@pytest.mark.usefixtures("alone")
def test_with_all_blocks_selected_it_is_full_attention(texts: Path) -> None:
    needle = {"lengths": [LENGTH], "depths": [0, 50], "samples": 1, "generate": True, "answer": "full"}
    config, model = made(texts, topk=LENGTH // 16, needle=needle)
    own = hidden(model)
    with full_from(model, FIRST):
        assert torch.allclose(hidden(model), own, atol=1e-10)
    maps = built(Needle, config).run(context(config, model)).data["maps"]
    assert list(maps) == ["moba", "moba, answers with full", "full"]
    assert maps["moba, answers with full"]["generated"] == maps["full"]["generated"]


def test_learned_sinks_windows_and_convolved_keys_stay(texts: Path) -> None:
    """They are parts of the model; a selection of all blocks is full attention with the sink, to convolved keys."""
    moba = {"block_size": 16, "topk": LENGTH // 16, "key_conv": 3, "backend": "reference"}
    window = {"kind": "window", "window": 32}
    config = recipe(texts, LENGTH, {}, attention={"full_layers": "last:1", "moba": moba, "overrides": {0: window}})
    (stage,) = stages_of(config)
    shape = config.model.model_copy(update={"sink_layers": "all"})
    model = build_model(model_spec(shape, [stage.attention])).double()
    initialize_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        parameter.data += 2.0 * name.endswith(("sink.weight", "moba.weight"))
    set_attention(config, model)
    own = hidden(model)
    prompt = torch.arange(2, 202).tolist()
    expected = [*generate(model, prompt, 8, temperature=0, decode="full")]
    with full_from(model, FIRST):
        assert torch.allclose(hidden(model), own, atol=1e-10)
    with full_from(model, 100):
        assert [*generate(model, prompt, 8, temperature=0, decode="full")] == expected


@pytest.mark.parametrize("name", ["needle", "ruler"])
def test_questions_begin_where_their_text_ends(texts: Path, name: str) -> None:
    """Nothing that is hidden lies behind the text, and nothing of the question before its end."""
    if name == "needle":
        found = recipe_texts(recipe(texts, LENGTH, {"needle": {"depths": [0, 100], "samples": 1}}))
        questions = found.questions(LENGTH)
        tokenizer = found.tokenizer
    else:
        options = RulerConfig(tasks=["niah_single", "vt"], samples=1)
        ruler = Ruler.texts(options, stage_setting(recipe(texts, 1024, {})))
        questions = [ruler.questions(task, 1024)[0].question for task in options.tasks]
        tokenizer = ruler.tokenizer
    for question in questions:
        asked = tokenizer.decode(question.tokens[question.text_length : question.prompt_length])
        read = tokenizer.decode(question.tokens[: question.text_length])
        assert 3 < len(asked.split()) < 60
        assert asked.split()[1] in ("special", "Find", "What", "all", "is", "are", "the", "What's") or "?" in asked
        assert len(read) > 4 * len(asked)
        assert all(source < question.text_length for source in question.sources)


@pytest.mark.parametrize("kind", ["nsa", "moba_v1", "moba_v05"])
def test_kinds_that_full_attention_cannot_replace_are_refused_by_name(texts: Path, kind: str) -> None:
    options = {"block_size": 16, "topk": 3}
    attention = {"default": kind, "full_layers": "last:1"} | ({kind: options} if "moba" in kind else {})
    config = recipe(texts, LENGTH, {"needle": {"answer": "full"}, "ruler": {"answer": "full"}}, attention=attention)
    with pytest.raises(ConfigError) as raised:
        check(config)
    for evaluation in (Needle, Ruler):
        assert f"{evaluation.key}.answer: given 'full', but layers of {kind} have no full attention" in str(
            raised.value
        )
