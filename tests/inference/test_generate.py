"""Generation through the cache gives the tokens that one pass over the complete text predicts."""

from typing import Any

import pytest
import torch

from moba_train.attention.full.kind import FullKind
from moba_train.attention.moba.kind import MobaKind
from moba_train.attention.protocol import LocalAttention, packed_layout
from moba_train.config.model import ModelConfig
from moba_train.inference.generate import generate
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer

CONFIG = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, layers=3, heads=4, kv_heads=2)
FULL = FullKind(FullKind.Options(), CONFIG.head_width)
MOBA = MobaKind(MobaKind.Options(block_size=8, topk=2), CONFIG.head_width)


def model_with(kinds: list[LocalAttention]) -> Transformer:
    model = Transformer(CONFIG).double()
    initialize_weights(model, seed=5)
    model.set_attention(kinds)
    return model


def most_likely(model: Transformer, tokens: list[int]) -> list[int]:
    """The most likely next token after every prefix, from one pass without cache."""
    length = len(tokens)
    logits = model(torch.tensor(tokens), torch.arange(length), packed_layout([length]))
    return logits.argmax(-1).tolist()


def prompt(length: int) -> list[int]:
    return torch.randint(97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("length", [1, 7, 8, 30])
def test_decoding_with_own_attention_is_the_whole_model_without_cache(length: int) -> None:
    """Prompts shorter than a block, ending with a block, and over several blocks; 40 tokens finish more blocks."""
    model = model_with([MOBA, MOBA, FULL])
    answer = list(generate(model, prompt(length), 40, temperature=0, decode="own"))
    assert answer == most_likely(model, prompt(length) + answer)[length - 1 : -1]


def test_full_decoding_of_a_full_model_is_the_full_model() -> None:
    model = model_with([FULL] * 3)
    answer = list(generate(model, prompt(20), 30, temperature=0))
    assert answer == most_likely(model, prompt(20) + answer)[19:-1]


def test_full_decoding_of_a_moba_model_prefills_sparsely() -> None:
    """The first token comes from the MoBA prefill; later ones see more than MoBA would."""
    model = model_with([MOBA] * 3)
    answer = list(generate(model, prompt(60), 40, temperature=0))
    assert answer[0] == most_likely(model, prompt(60))[-1]
    assert answer != list(generate(model, prompt(60), 40, temperature=0, decode="own"))


def test_sampling_repeats_with_the_seed_and_differs_without() -> None:
    model = model_with([FULL] * 3)
    first, again, other = (list(generate(model, prompt(5), 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_tiny_nucleus_is_greedy() -> None:
    model = model_with([FULL] * 3)
    assert list(generate(model, prompt(5), 20, top_p=1e-6)) == list(generate(model, prompt(5), 20, temperature=0))


def test_the_stop_token_ends_the_answer_unsaid() -> None:
    model = model_with([FULL] * 3)
    answer = list(generate(model, prompt(5), 20, temperature=0))
    stop = answer[6]
    assert list(generate(model, prompt(5), 20, temperature=0, stop_token=stop)) == answer[: answer.index(stop)]


def test_the_model_is_as_before_after_an_interrupted_generation() -> None:
    model = model_with([MOBA, MOBA, FULL])
    before = most_likely(model, prompt(30))
    generation = generate(model, prompt(10), 20)
    next(generation)
    generation.close()
    assert most_likely(model, prompt(30)) == before


@pytest.mark.parametrize(
    ("options", "named"), [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p")]
)
def test_values_out_of_range_are_named(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        next(generate(model_with([FULL] * 3), prompt(5), 5, **options))
    with pytest.raises(ValueError, match="prompt"):
        next(generate(model_with([FULL] * 3), [], 5))


@pytest.mark.parametrize(("decode", "message"), [("moba", "is called 'own' now"), ("sparse", "allowed: full, own")])
def test_another_attention_of_new_tokens_is_refused(decode: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(model_with([FULL] * 3), prompt(5), 5, decode=decode))
