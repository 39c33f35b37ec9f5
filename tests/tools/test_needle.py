"""Needle in a haystack: where needles are, who finds them, and which blocks are selected."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.layout import TokenRange
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import Observer, observing
from moba_train.config.load import dump_config, load_config
from moba_train.errors import ConfigError, DataError
from moba_train.foreign_files import ROOTS
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World
from moba_train.telemetry.jsonl import read_records
from moba_train.tools.cli import app
from moba_train.tools.needle import answers
from moba_train.tools.needle.answers import Question, SelectedBlocks, answer_batch, encode_segments, predicted_answers
from moba_train.tools.needle.needle import Needle, NeedleTexts
from moba_train.tools.needle.options import NeedleConfig
from moba_train.tools.text_tokenizer import load_tokenizer
from moba_train.train import main
from tests.commands import run_app
from tests.evals.setting import built
from tests.resolved import check, stages_of
from tests.tools.questions import Reader, context, recipe, recipe_texts

LENGTH = 448


def needle_texts(texts: Path, **needle: Any) -> NeedleTexts:
    return recipe_texts(recipe(texts, LENGTH, {"needle": needle}))


@pytest.mark.parametrize("depth", [0.0, 37.5, 100.0])
def test_the_needle_is_exactly_at_its_depth_in_a_sample_of_exactly_the_length(texts: Path, depth: float) -> None:
    made = needle_texts(texts, depths=[depth], samples=2)
    tokenizer = made.tokenizer
    for index, question in enumerate(made.questions(LENGTH)):
        assert len(question.tokens) == LENGTH
        (answer,) = question.answers
        value = tokenizer.decode(question.tokens[slice(*answer)])
        assert answer.stop == LENGTH
        assert answer.start == question.prompt_length
        assert value[0] == " "
        assert len(value.strip()) == 7
        assert value.strip().isdigit()
        # The sources are the needle's value, token by token, and the needle lies where the depth says.
        assert [question.tokens[at] for at in question.sources] == question.tokens[slice(*answer)]
        parts = made._parts(LENGTH, index)
        (needle,) = parts.needles
        room, _ = made._room(LENGTH, index)
        begin = question.sources[0] - needle.value.start
        assert begin == len(parts.head) + round(depth / 100 * room)
        assert question.tokens[begin : begin + len(needle.tokens)] == needle.tokens
        text = tokenizer.decode(question.tokens)
        assert text.count(f"is:{value}.\n") == 1
        assert text.startswith("A special magic number is hidden within the following text.")
        assert text.endswith(f"mentioned in the provided text is{value}")


def test_all_depths_have_the_same_text_around_the_needle_and_samples_differ(texts: Path) -> None:
    def haystacks() -> list[list[int]]:
        made = needle_texts(texts, depths=[0, 50, 100], samples=2)
        found = []
        for number, question in enumerate(made.questions(LENGTH)):
            (needle,) = made._parts(LENGTH, number % 2).needles
            begin = question.sources[0] - needle.value.start
            found.append(question.tokens[:begin] + question.tokens[begin + len(needle.tokens) :])
        return found

    first = haystacks()
    assert first[0] == first[2] == first[4]
    assert first[1] == first[3] == first[5]
    assert first == haystacks()
    assert first[0] != first[1]


def test_several_needles_are_asked_for(texts: Path) -> None:
    made = needle_texts(texts, needles=2, depths=[50], samples=1)
    (question,) = made.questions(LENGTH)
    text = made.tokenizer.decode(question.tokens)
    assert text.count("One of the special magic numbers for") == 2
    first, second = (made.tokenizer.decode(question.tokens[slice(*answer)]) for answer in question.answers)
    assert text.endswith(f"mentioned in the provided text are{first},{second}")
    assert len(question.places) == len(question.sources) == sum(stop - start for start, stop in question.answers)
    assert question.right([question.tokens[place] for place in question.places]) == [True, True]
    assert question.right([question.tokens[place] for place in question.places[:-1]] + [-1]) == [True, False]


def test_a_model_that_reads_finds_all_needles_and_one_of_short_sight_only_the_last(texts: Path, alone: World) -> None:
    section = {"depths": [0, 50, 100], "samples": 3, "lengths": [256, LENGTH], "needles": 1, "generate": True}
    config = recipe(texts, LENGTH, {"needle": section})
    evaluation = built(Needle, config)
    found = evaluation.run(context(config, Reader(config, sight=LENGTH)))
    assert found.numbers == {"needle": 1.0, "needle_full": 1.0}
    assert found.data["maps"]["moba"]["generated"] == [[1.0] * 3] * 2
    assert "needle 1.000 of 18 samples with moba attention" in found.message
    short = evaluation.run(context(config, Reader(config, sight=120)))
    assert short.data["maps"]["full"]["passed"] == [[0.0, 0.0, 1.0]] * 2
    assert short.data["maps"]["full"]["outcomes"] == [["000", "000", "111"]] * 2
    assert short.data["maps"]["full"]["generated"] == [[0.0, 0.0, 1.0]] * 2
    assert short.numbers["needle"] == pytest.approx(1 / 3)
    blind = evaluation.run(context(config, Reader(config, sight=30)))
    assert blind.numbers == {"needle": 0.0, "needle_full": 0.0}


def test_several_needles_are_found_by_a_model_that_reads(texts: Path, alone: World) -> None:
    config = recipe(texts, LENGTH, {"needle": {"depths": [0, 100], "samples": 2, "lengths": [LENGTH], "needles": 2}})
    evaluation = built(Needle, config)
    assert evaluation.run(context(config, Reader(config, sight=LENGTH))).numbers["needle"] == 1.0
    half = evaluation.run(context(config, Reader(config, sight=30)))
    assert half.data["maps"]["moba"]["answers"] == [[0.0, 0.0]]


class Recorder(Observer):
    """Keeps every selection."""

    def __init__(self) -> None:
        self.ids: list[Any] = []

    def selected(self, attention: Any, selection: Any, layout: Any) -> None:
        if isinstance(attention, MobaAttention):
            self.ids.append(selection[0].tolist())


def test_an_untrained_model_finds_nothing_and_selected_blocks_are_those_of_the_gate(texts: Path, alone: World) -> None:
    section = {"depths": [0, 50, 100], "samples": 2, "lengths": [LENGTH]}
    config = recipe(texts, LENGTH, {"needle": section})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    evaluation = built(Needle, config)
    result = evaluation.run(context(config, model))
    assert result.numbers == {"needle": 0.0, "needle_full": 0.0}
    selected = result.data["maps"]["moba"]["selected"]
    assert selected[0][2] is None, "the last layer is full"
    assert result.data["maps"]["full"]["selected"] == [[None] * 3]

    model.set_attention(build_attention(stages_of(config)[0].attention, model.config.head_width))
    counts = [[0, 0], [0, 0]]
    for question in needle_texts(texts, **section).questions(LENGTH):
        batch = answer_batch(question, LENGTH)
        with observing(LOCAL_ENGINE, Recorder()) as recorder:
            model(batch.tokens, batch.positions, batch.layout, batch.loss_index)
        for layer, heads in enumerate(recorder.ids):
            for blocks in heads:
                for place, source in zip(question.places, question.sources, strict=True):
                    own = (place - 1) // 16
                    counts[layer][0] += source // 16 in [*blocks[place - 1], own]
                    counts[layer][1] += 1
    assert selected[0][:2] == [found / asked for found, asked in counts]
    assert all(0 < share < 1 for share in selected[0][:2])


def test_a_layer_that_selects_every_block_has_the_needle_in_all_heads(texts: Path, alone: World) -> None:
    options = {"block_size": 16, "topk": 32, "backend": "reference"}
    config = recipe(texts, LENGTH, {"needle": {"lengths": [LENGTH]}}, attention={"moba": options})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    result = built(Needle, config).run(context(config, model))
    assert result.data["maps"]["moba"]["selected"] == [[1.0] * 3]
    assert result.data["maps"]["moba"]["passed"] == result.data["maps"]["full"]["passed"]


def test_a_generated_answer_ends_before_the_end_of_the_text(texts: Path, alone: World) -> None:
    """All ranks generate as many tokens; what a model writes after its end is no part of the answer."""
    config = recipe(texts, 256, {"needle": {"lengths": [256], "depths": [50], "samples": 1}})
    tokenizer = load_tokenizer(str(config.data.tokenizer))
    model = Transformer(config.model).to(alone.device)
    asked = [Question([1, 2, 3], 2, [TokenRange(2, 3)], [])] * 2
    written = iter([[7, tokenizer.eos_id, 8], [7, 8, 9]])
    with patch.object(answers, "generate", lambda *_, **__: next(written)):
        found = answers.generated_answers(context(config, model), asked, 3, tokenizer, "test")
    assert found == [[7], [7, 8, 9]]


def test_a_depth_that_the_recipe_leaves_out_is_set_among_the_defaults(texts: Path, tmp_path: Path) -> None:
    """A section that is null holds its defaults as soon as one of its keys is set."""
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_config(recipe(texts, LENGTH, {})))
    found = load_config(file, ["evaluation.needle.depths.0=5"]).evaluation.options_of("needle")
    assert isinstance(found, NeedleConfig)
    assert found.depths == [5, *NeedleConfig().depths[1:]]


@pytest.mark.parametrize(("cp", "tp", "padded"), [(1, 1, 101), (1, 2, 102), (3, 1, 102), (3, 2, 108), (4, 1, 104)])
def test_sequences_are_padded_to_what_all_ranks_divide_in_two_chunks_each(cp: int, tp: int, padded: int) -> None:
    engine = None if cp == 1 else SimpleNamespace(strategy=SimpleNamespace(ranks=cp))
    shard = SimpleNamespace(engine=engine, tp_size=tp)
    assert answers.padded_length(101, shard) == padded  # type: ignore[arg-type]


def test_predictions_are_the_most_likely_tokens_of_the_logits(texts: Path, alone: World) -> None:
    config = recipe(texts, LENGTH, {"needle": {"needles": 2, "samples": 2, "depths": [50]}})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    found = context(config, model)
    asked = needle_texts(texts, needles=2, samples=2, depths=[50]).questions(LENGTH)
    for _ in found.each_attention():
        blocks = SelectedBlocks(3, alone.device)
        predicted = predicted_answers(found, asked, LENGTH, "test", blocks)
        for question, tokens in zip(asked, predicted, strict=True):
            batch = answer_batch(question, LENGTH)
            logits = model(batch.tokens, batch.positions, batch.layout)
            assert tokens == logits.argmax(-1)[torch.tensor(question.places) - 1].tolist()


@pytest.mark.parametrize(
    ("section", "keys", "problem"),
    [
        ({"lengths": [256, 640]}, {}, r"evaluation.needle.lengths: given 640; allowed: at most 448, the longest"),
        (
            {},
            {"data": {"train": [{"path": "a"}]}},
            r"evaluation.needle: needs the model's tokenizer; set data.tokenizer",
        ),
        (
            {},
            {"data": {"train": [{"path": "a"}], "tokenizer": "t"}},
            r"evaluation.needle: needs text to hide needles in; set data.validation",
        ),
        ({"generate": True}, {"parallel": {"tp": 2}}, r"evaluation.needle.generate: given true, which parallel.tp 2"),
    ],
)
def test_recipes_that_cannot_work_are_refused_by_key(
    texts: Path, section: dict[str, Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(recipe(texts, LENGTH, {"needle": section}, **keys))


def test_a_haystack_shorter_than_the_needle_or_than_its_corpus_is_refused(texts: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation.needle.lengths: given 100, which leaves \d+ tokens for the hay"):
        needle_texts(texts, lengths=[100]).questions(100)
    with pytest.raises(DataError, match=r"data.validation: the corpus .* has \d+ tokens of text, fewer than the"):
        needle_texts(texts).questions(100_000)


@pytest.mark.parametrize(
    ("seq_len", "section", "problem"),
    [
        (
            LENGTH,
            {"needle": {"lengths": [100]}},
            r"evaluation.needle.lengths: given 100, which leaves .* \(stage 'only'",
        ),
        (LENGTH, {"ruler": {"tasks": ["vt"], "lengths": [64]}}, r"evaluation.ruler.lengths: given 64; the shortest"),
        (2**17, {"needle": {}}, r"data.validation: the corpus .* has \d+ tokens of text, fewer than the \d+ of a hay"),
        (2**17, {"needle_signal": {}}, r"data.validation: the corpus .* has \d+ tokens of text, fewer than"),
        (2**17, {"ruler": {"tasks": ["niah_multikey"]}}, r"data.validation: the corpus .* has \d+ tokens of text, few"),
    ],
)
def test_samples_that_cannot_be_made_are_refused_before_training(
    texts: Path, seq_len: int, section: dict[str, Any], problem: str
) -> None:
    """They would end the run at the first evaluation of their stage."""
    with pytest.raises(ConfigError, match=problem):
        check(recipe(texts, seq_len, section), check_files=True)
    unseen = {"name": "only", "seq_len": seq_len, "tokens": seq_len, "evaluate": False}
    check(recipe(texts, seq_len, section, stages=[unseen]), check_files=True)


def test_a_stage_without_a_length_that_fits_says_what_is_missing(texts: Path) -> None:
    config = recipe(texts, 64, {"needle": {}})
    assert "lengths: given 64, which leaves " in built(Needle, config).missing


def test_a_checkpoint_that_is_evaluated_at_another_length_keeps_its_trained_length(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"run_dir": str(tmp_path / "run"), "stages": [{"name": "only", "seq_len": 64, "tokens": 64}]}
    trained = recipe(texts, 64, {}, **keys)
    monkeypatch.setenv(ROOTS, str(texts))
    (tmp_path / "recipe.yaml").write_text(dump_config(trained))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    command = ["eval", str(tmp_path / "run"), "--tasks", "needle,ruler", "--seq-len", "1K"]
    sizes = ["evaluation.needle.samples=1", "evaluation.ruler.samples=1", "evaluation.ruler.tasks=[vt]"]
    done = run_app(app, *command, *sizes, "--output", tmp_path / "out")
    assert done.stdout.count("; trained on 64 tokens") == 2
    measured = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    lengths = {measured["needle"]["trained_length"], measured["ruler"]["trained_length"], measured["trained_seq_len"]}
    assert lengths == {64}


def test_a_stage_trains_until_the_needle_is_found(texts: Path, tmp_path: Path) -> None:
    """The criterion is judged at each evaluation; this model never meets it. The map goes to the log and the report."""
    until = {"metric": "needle", "at_least": 0.95, "max_tokens": 2 * LENGTH}
    stage = {"name": "only", "seq_len": LENGTH, "tokens": LENGTH, "until": until}
    section = {"needle": {"samples": 1, "depths": [0, 100], "lengths": [256], "every": 1}}
    telemetry = {"console": False, "wandb": {"mode": "disabled"}}  # with the report
    config = recipe(texts, LENGTH, section, run_dir=str(tmp_path / "run"), stages=[stage], telemetry=telemetry)
    (tmp_path / "recipe.yaml").write_text(dump_config(config))
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    found = [record for record in records if record["type"] == "needle"]
    assert [record["needle"] for record in found] == [0.0] * 2
    assert found[0]["needle_full"] == 0.0
    assert found[0]["needle_map"]["lengths"] == [256]
    exits = [record["message"] for record in records if record["type"] == "stage_exit"]
    assert "needle 0.0000, wanted: at least 0.95" in exits[-1]
    assert '"needle-0-0-' in (tmp_path / "run" / "report.html").read_text()


def test_segments_are_encoded_without_tokens_that_span_two(texts: Path) -> None:
    tokenizer = load_tokenizer(texts / "tok.model")
    parts = ["One of the special magic numbers for x is:", " 1234567", ",", " 7654321", "."]
    encoded = encode_segments(tokenizer, parts)
    assert tokenizer.decode([token for part in encoded for token in part]) == "".join(parts)
    assert [tokenizer.decode(part) for part in encoded[1:]] == [" 1234567", ",", " 7654321", "."]


def test_an_evaluation_leaves_no_hook_or_observer_behind(texts: Path, alone: World) -> None:
    config = recipe(texts, LENGTH, {"needle": {"samples": 1, "depths": [0], "lengths": [LENGTH]}})
    model = Transformer(config.model)
    initialize_weights(model, 0)
    built(Needle, config).run(context(config, model))
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert LOCAL_ENGINE.observers == ()


def test_a_question_goes_through_the_chat_template_beside_the_tokenizer(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "tok.model").write_bytes((texts / "tok.model").read_bytes())
    source = [{"path": str(texts / "corpus")}]
    data = {"train": source, "validation": source, "tokenizer": str(tmp_path / "tok.model")}
    config = recipe(texts, LENGTH, {"needle": {"chat": True, "samples": 1}}, data=data)
    with pytest.raises(
        DataError, match=r"^evaluation\.needle\.chat: given true, .* no chat_template\.jinja.*set false"
    ):
        recipe_texts(config)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    settings = {"chat_template": template, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    made = recipe_texts(config)
    question = made.questions(LENGTH)[0]
    text = made.tokenizer.decode(question.tokens)
    assert text.startswith("<user>A special magic number is hidden")
    assert "mentioned in the provided text?<end><assistant>The special magic number for" in text
    assert len(question.tokens) == LENGTH
