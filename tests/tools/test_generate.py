"""Generation through the cache gives the tokens that one pass over the complete text predicts."""

import math
from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.config.model import ModelConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.tools.inference import generate as generate_module
from moba_train.tools.inference.cache import CachedAttention, CachePlan, Decode
from moba_train.tools.inference.generate import Sampling, generate, generate_batch, sample
from moba_train.tools.inference.graph import cuda_graph
from tests.attention.kind_checks import MODEL, small_model

CONFIG = ModelConfig(vocab_size=97, hidden_size=32, intermediate_size=48, layers=3, heads=4, kv_heads=2)
FULL = FullKind(FullKind.Options(), CONFIG.head_width)
MOBA = MobaKind(MobaKind.Options(block_size=8, topk=2), CONFIG.head_width)
GROUPED = MobaKind(MobaKind.Options(block_size=4, topk=3, select="group", always=("first",)), CONFIG.head_width)


def model_with(kinds: Sequence[AttentionKind]) -> Transformer:
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("decode", ["own", "full"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cuda_graph_says_what_launches_one_by_one_say(decode: Decode, temperature: float) -> None:
    """The graph is recorded again after 64 tokens, or 128 with full attention alone."""
    options = {"block_size": 64, "topk": 2, "select": "group"}
    model = small_model("moba", options, MODEL.model_copy(update={"head_dim": 64})).bfloat16().cuda()
    kinds = model.attention_kinds()
    model.set_attention([kinds[0], FullKind(FullKind.Options(), 64)])
    prompts = [[token % 50 for token in prompt(length)] for length in (1, 100)]
    for one in prompts:
        graph, launches = (
            list(generate_batch(model, [one], 300, Sampling(temperature), decode=decode, record=record))
            for record in (cuda_graph, None)
        )
        assert len(graph) == 300
        assert graph == launches


def test_sampling_repeats_with_the_seed_and_differs_without() -> None:
    model = model_with([FULL] * 3)
    first, again, other = (list(generate(model, prompt(5), 20, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_tiny_nucleus_is_greedy() -> None:
    model = model_with([FULL] * 3)
    assert list(generate(model, prompt(5), 20, top_p=1e-6)) == list(generate(model, prompt(5), 20, temperature=0))


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        (Sampling(), [0.15, 0.5, 0.05, 0.3]),
        (Sampling(temperature=2.0), [0.208, 0.379, 0.120, 0.294]),  # roots of the probabilities, over their sum
        (Sampling(top_p=0.7), [0.0, 0.625, 0.0, 0.375]),
        (Sampling(top_p=0.81), [0.158, 0.526, 0.0, 0.316]),
        (Sampling(vocab_size=2), [0.231, 0.769, 0.0, 0.0]),
        (Sampling(temperature=1e-40), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(temperature=5e-324), [0.0, 1.0, 0.0, 0.0]),
        (Sampling(temperature=math.inf), [0.25, 0.25, 0.25, 0.25]),
    ],
    ids=[
        "as is",
        "temperature",
        "two tokens",
        "three tokens",
        "vocabulary",
        "no float32",
        "float64's least",
        "infinite",
    ],
)
def test_tokens_are_drawn_as_often_as_temperature_and_nucleus_say(sampling: Sampling, want: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log() + 7
    drawn = torch.tensor([sample(logits, sampling, generator) for _ in range(4000)])
    got = drawn.bincount(minlength=4) / 4000
    torch.testing.assert_close(got, torch.tensor(want), rtol=0, atol=0.03)
    assert not got[torch.tensor(want) == 0].any()


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=-1), Sampling(temperature=math.nan), Sampling(top_p=math.nan)]
)
def test_values_out_of_range_are_refused(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"(temperature|top_p): (-1|nan) given, "):
        sampling.check()


def test_the_first_stop_token_ends_the_answer_unsaid() -> None:
    model = model_with([FULL] * 3)
    answer = list(generate(model, prompt(5), 20, temperature=0))
    stops = [answer[9], answer[6]]
    expected = answer[: min(map(answer.index, stops))]
    assert list(generate(model, prompt(5), 20, temperature=0, stop_tokens=stops)) == expected


def test_the_model_is_as_before_after_an_interrupted_generation() -> None:
    model = model_with([MOBA, MOBA, FULL])
    before = most_likely(model, prompt(30))
    generation = generate(model, prompt(10), 20)
    next(generation)
    assert isinstance(generation, Generator)
    generation.close()
    assert most_likely(model, prompt(30)) == before


@pytest.mark.parametrize(
    ("options", "named"), [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.5}, "top_p")]
)
def test_values_out_of_range_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        next(generate(model_with([FULL] * 3), prompt(5), 5, **options))
    with pytest.raises(ValueError, match="prompt"):
        next(generate(model_with([FULL] * 3), [], 5))


def test_another_attention_of_new_tokens_is_refused() -> None:
    decode: Any = "sparse"
    with pytest.raises(ValueError, match="allowed: full, own"):
        next(generate(model_with([FULL] * 3), prompt(5), 5, decode=decode))


def in_a_batch(model: Transformer, prompts: list[list[int]], tokens: int, **options: Any) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in prompts]
    for step in generate_batch(model, prompts, tokens, Sampling(temperature=0), **options):
        for index, token in step.items():
            answers[index].append(token)
    return answers


def test_a_batch_of_prompts_of_different_lengths_says_what_each_says_alone() -> None:
    model = model_with([MOBA, GROUPED, FULL])
    prompts = [prompt(length) for length in (1, 30, 8, 41)]
    alone = [list(generate(model, one, 20, temperature=0, decode="own")) for one in prompts]
    assert in_a_batch(model, prompts, 20, decode="own") == alone
    for one, answer in zip(prompts, alone, strict=True):
        assert answer == most_likely(model, one + answer)[len(one) - 1 : -1]


def test_a_sequence_that_stops_leaves_the_others_as_they_are() -> None:
    model = model_with([MOBA, MOBA, FULL])
    prompts = [prompt(length) for length in (5, 30, 19)]
    whole = in_a_batch(model, prompts, 20, decode="own")
    stop = whole[1][4]
    cut = [answer[: answer.index(stop)] if stop in answer else answer for answer in whole]
    assert in_a_batch(model, prompts, 20, decode="own", stop_tokens=[stop]) == cut
    assert len(cut[1]) < 5 <= max(map(len, cut))


def test_sequences_of_a_batch_draw_differently_and_the_same_again() -> None:
    model = model_with([FULL] * 3)
    batch = [list(step.values()) for step in generate_batch(model, [prompt(5)] * 2, 20, Sampling(seed=3))]
    first, second = zip(*batch, strict=True)
    assert first != second
    assert list(first) == list(generate(model, prompt(5), 20, seed=3))
    assert list(second) == list(generate(model, prompt(5), 20, seed=4))


@pytest.mark.parametrize("part", [1, 7, 8, 13])
def test_a_prompt_read_in_parts_is_the_prompt_read_at_once(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with([MOBA, GROUPED, FULL])
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", part)
    read: list[int] = []
    answer = list(generate(model, prompt(50), 12, temperature=0, decode="own", on_prefill=read.append))
    assert answer == most_likely(model, prompt(50) + answer)[49:-1]
    assert sum(read) == 50
    assert max(read) == part


def test_the_logits_of_every_new_token_are_those_of_the_complete_pass() -> None:
    """The tokens are given: an error cannot hide behind an equal maximum."""
    model = model_with([MOBA, GROUPED, FULL])
    tokens = torch.tensor(prompt(60))
    plan = CachePlan([60], torch.device("cpu"))
    with torch.no_grad():
        whole = model(tokens, torch.arange(60), packed_layout([60]))
        model.set_engines([CachedAttention(plan, "own", kind) for kind in model.attention_kinds()])
        plan.read(0, 11)
        rows = [model(tokens[:11], torch.arange(11), plan.layout)]
        for place in range(11, 60):
            plan.decode([0])
            rows.append(model(tokens[place : place + 1], torch.tensor([place]), plan.layout))
    torch.testing.assert_close(torch.cat(rows), whole, rtol=0, atol=1e-12)


def test_a_block_is_summarized_once_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with([MOBA, MOBA, FULL])
    pooled: list[int] = []
    summarize = MobaAttention.summarize

    def counted(attention: MobaAttention, k_SKD: torch.Tensor, layout: Layout) -> torch.Tensor:
        pooled.append(k_SKD.shape[0])
        return summarize(attention, k_SKD, layout)

    monkeypatch.setattr(MobaAttention, "summarize", counted)
    assert len(list(generate(model, prompt(30), 21, temperature=0, decode="own"))) == 21
    each = [1, 24, 8, 8, 8]  # a token for the shape, three blocks of the prompt, blocks that end at 32, 40 and 48
    assert sorted(pooled) == sorted(each * 2)


@pytest.mark.parametrize(("block_size", "parts"), [(6, [30, 30, 2]), (8, [32, 30]), (40, [40, 22])])
def test_a_prompt_is_cut_where_blocks_end_that_select_together(
    block_size: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`seer` selects from the mean query of a whole block."""
    model = small_model("seer", {"block_size": block_size, "topk": 2, "mode": "sparse"})
    monkeypatch.setattr(generate_module, "PREFILL_TOKENS", 32)
    read: list[int] = []
    tokens = torch.arange(62) % MODEL.vocab_size
    answer = list(generate(model, tokens.tolist(), 1, temperature=0, on_prefill=read.append))
    assert read == parts
    assert answer == [model(tokens, torch.arange(62), packed_layout([62]))[-1].argmax().item()]
