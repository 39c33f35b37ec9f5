"""Log-likelihoods of packed continuations are those of each text alone, in float64. Needs no package lm-eval."""

import random

import pytest
import torch

from moba_train.attention.layout import packed_layout
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.model.build import build_attention
from moba_train.model.transformer import Transformer
from moba_train.tools.lm_eval.scoring import Continuation, score
from moba_train.tools.needle.full_answers import full_from
from tests.noting import noting

MODEL = ModelConfig(vocab_size=40, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2)


def model_with(attention: AttentionConfig) -> Transformer:
    """Random weights in float64, and predictions far from even."""
    torch.manual_seed(0)
    model = Transformer(MODEL).double()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    model.set_attention(build_attention(resolve_layers(attention, MODEL.layers), MODEL.head_width))
    return model


@torch.no_grad()
def alone(model: Transformer, asked: Continuation) -> tuple[float, bool]:
    """Token by token, each context a forward pass of its own."""
    whole = [*asked.read, asked.predicted[-1]]
    total = 0.0
    greedy = True
    for place in range(len(whole) - len(asked.predicted), len(whole)):
        tokens_T = torch.tensor(whole[:place])
        logits_V = model(tokens_T, torch.arange(place), packed_layout([place]))[-1]
        total += logits_V.log_softmax(-1)[whole[place]].item()
        greedy &= int(logits_V.argmax()) == whole[place]
    return total, greedy


@torch.no_grad()
def most_likely(model: Transformer, tokens: tuple[int, ...]) -> int:
    return int(model(torch.tensor(tokens), torch.arange(len(tokens)), packed_layout([len(tokens)]))[-1].argmax())


@pytest.mark.parametrize(
    "attention",
    [
        AttentionConfig.model_validate({"default": "full"}),
        AttentionConfig.model_validate({"full_layers": "last:1", "moba": {"block_size": 4, "topk": 2}}),
    ],
    ids=["full", "moba"],
)
@pytest.mark.parametrize("batch_tokens", [1, 60, 10_000])
def test_packed_scores_are_those_of_each_text_alone(attention: AttentionConfig, batch_tokens: int) -> None:
    model = model_with(attention)
    drawn = random.Random(0)
    asked = []
    for _ in range(10):
        read = tuple(drawn.randrange(40) for _ in range(drawn.randint(3, 30)))
        likely = most_likely(model, read)
        for last in (likely, (likely + 1) % 40):  # answers of one token to one context, as in multiple choice
            asked.append(Continuation(read, (last,)))
            asked.append(Continuation(read, (*read[-2:], last)))
    done: list[int] = []
    found = score(model, asked, batch_tokens, done.append)
    assert sum(done) == len(asked)
    assert {result.greedy for result in found} == {True, False}
    for one, result in zip(asked, found, strict=True):
        expected = alone(model, one)
        assert result.log_likelihood == pytest.approx(expected[0], rel=1e-6)
        assert result.greedy == expected[1]


@pytest.mark.parametrize("batch_tokens", [1, 10_000])
def test_answers_are_scored_with_full_attention_behind_a_text_that_moba_has_read(batch_tokens: int) -> None:
    model = model_with(AttentionConfig.model_validate({"full_layers": "last:1", "moba": {"block_size": 4, "topk": 2}}))
    drawn = random.Random(0)
    texts = [tuple(drawn.randrange(40) for _ in range(length)) for length in (30, 21, 30)]
    asked = [Continuation(read, read[-length:]) for read in texts for length in (1, 4, 7)]
    own, found = (score(model, asked, batch_tokens, in_full=in_full) for in_full in (False, True))
    for one, result in zip(asked, found, strict=True):
        first = len(one.read) - len(one.predicted)
        with torch.no_grad(), full_from(model, first):
            logits = model(torch.tensor(one.read), torch.arange(len(one.read)), packed_layout([len(one.read)]))
        expected = logits[first:].log_softmax(-1).gather(1, torch.tensor(one.predicted)[:, None]).sum().item()
        assert result.log_likelihood == pytest.approx(expected, rel=1e-9)
    assert all(one.log_likelihood != result.log_likelihood for one, result in zip(own, found, strict=True))


def test_a_context_that_several_continuations_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with(AttentionConfig.model_validate({"default": "full"}))
    read: list[int] = []
    noted = noting(lambda tokens_T, *_: read.append(len(tokens_T)), model.hidden)
    monkeypatch.setattr(model, "hidden", noted)
    context = tuple(range(20))
    score(model, [Continuation(context, (answer,)) for answer in range(4)], 1000)
    assert read == [20]


def test_an_empty_continuation_has_probability_one() -> None:
    model = model_with(AttentionConfig.model_validate({"default": "full"}))
    empty, _ = score(model, [Continuation((1, 2), ()), Continuation((1, 2), (3,))], 100)
    assert (empty.log_likelihood, empty.greedy) == (0.0, True)
