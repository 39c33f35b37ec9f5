"""RULER's tasks: the format is the benchmark's, samples fit their length, and scores are RULER's."""

import importlib.util
import random
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moba_train.errors import ConfigError, DataError
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World
from moba_train.tools.needle.haystack import needle_frame, needle_sentence
from moba_train.tools.tasks.metrics import found_share
from moba_train.tools.tasks.ruler import DEPTHS, TASKS, Ruler
from moba_train.tools.tasks.sized import SizedTexts
from tests.evals.setting import built, stage_setting
from tests.resolved import check
from tests.tools.questions import Reader, context, recipe

LENGTH = 3072
SENTENCES = "It rained all day. The fox slept. Dogs ran over the hill and back. Nothing else was seen."
WORDS = SENTENCES.split() * 40


def texts_of(texts: Path, **section: Any) -> SizedTexts:
    config = recipe(texts, LENGTH, {"ruler": section})
    evaluation: Any = config.evaluation  # its sections are found when it is loaded
    assert evaluation.ruler is not None
    return Ruler.texts(evaluation.ruler, stage_setting(config))


@pytest.mark.parametrize("task", TASKS)
def test_samples_fill_their_length_and_hold_their_answers(texts: Path, task: str) -> None:
    made = texts_of(texts, tasks=[task], samples=2)
    first, second = made.questions(task, LENGTH)
    assert first.question.tokens != second.question.tokens
    assert made.questions(task, LENGTH)[0] == first
    least = LENGTH - TASKS[task].tokens_to_generate
    for prompt in (first, second):
        question = prompt.question
        assert len(question.tokens) <= LENGTH
        assert question.prompt_length > 0.85 * least
        text = made.tokenizer.decode(question.prompt)
        assert all(reference in text for reference in prompt.references)
        counted = [made.tokenizer.decode(question.tokens[slice(*answer)]).strip() for answer in question.answers]
        assert counted == prompt.references
        whole = made.tokenizer.decode(question.tokens[question.prompt_length :])
        assert found_share(whole, prompt.references) == 1.0


def test_every_answer_is_the_right_one() -> None:
    """Counted or traced anew from the text alone."""
    drawn = random.Random(0)
    for _ in range(5):
        common = TASKS["cwe"].text(30, LENGTH, drawn, [])
        listed = re.findall(r"\d+\. (\S+)", common.context)
        by_count = sorted(set(listed), key=listed.count, reverse=True)
        assert set(by_count[:10]) == set(common.references)
        frequent = TASKS["fwe"].text(800, LENGTH, drawn, [])
        coded = frequent.context.split()
        ranked = sorted(set(coded), key=coded.count, reverse=True)
        assert ranked[:4] == ["...", *frequent.references]
        traced = TASKS["vt"].text(12, LENGTH, drawn, [])
        value = re.search(r"assigned the value (\d+)", traced.after)
        assert value is not None
        known = {value[1]}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", traced.context):
            known |= {name} if source in known else set()
        assert known - {value[1]} == set(traced.references)
        for name in ("niah_multivalue", "niah_multiquery", "niah_multikey", "niah_multikey_3"):
            needles = TASKS[name].text(60, LENGTH, drawn, WORDS)
            asked = re.search(r"for (.*) mentioned", needles.after)
            assert asked is not None
            keys = re.split(r", and |, ", asked[1])
            values = [re.findall(rf"for {re.escape(key)} is: (\S+)\.", needles.context) for key in keys]
            assert sorted(value for found in values for value in found) == sorted(needles.references)


def test_no_distractor_has_a_key_that_is_asked_for() -> None:
    """Among 40,000 lines, a million tokens, every second question would have two answers."""
    for seed in range(3):
        text = TASKS["niah_multikey_2"].text(40_000, 2**20, random.Random(seed), [])
        asked = re.search(r"for (\S+) mentioned", text.after)
        assert asked is not None
        assert re.findall(rf"for {asked[1]} is: (\S+)\.", text.context) == text.references


@pytest.mark.parametrize(
    ("answer", "score"),
    [("1234567", 0.5), ("It is 1234567 and ABCDEFG.", 1.0), ("\tabcdefg\n1234567 ", 1.0), ("123456", 0.0), ("", 0.0)],
)
def test_the_score_is_the_share_of_references_found_in_any_case(answer: str, score: float) -> None:
    assert found_share(answer, ["1234567", "AbCdEfG"]) == score


def stub(name: str, **members: Any) -> types.ModuleType:
    """A module with these members."""
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


@pytest.fixture(scope="module")
def harness() -> Iterator[dict[str, Any]]:
    """lm-evaluation-harness' RULER modules, without its large imports and word lists, and without its downloads."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        pytest.skip("lm-evaluation-harness is not installed")
    for name in ("nltk", "scipy", "tqdm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = Path(found.origin).parent / "tasks" / "ruler"
    kinds = ("noun", "adjective", "verb", "nouns", "adjectives", "verbs")
    words = {kind: [f"{kind}{chr(97 + at)}" for at in range(20)] for kind in kinds}
    modules: dict[str, Any] = {
        "datasets": stub("datasets", Dataset=None, Split=None, load_dataset=None),
        "transformers": stub("transformers", AutoTokenizer=None),
        "wonderwords": stub("wonderwords", RandomWord=lambda: types.SimpleNamespace(_categories=words)),
        "nltk": stub("nltk", data=types.SimpleNamespace(find=lambda *_: None), sent_tokenize=None),
        **{name: stub(name) for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ruler")},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        loaded = {}
        for name in ("common_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils"):
            full = f"lm_eval.tasks.ruler.{name}"
            spec = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, full, module)
            spec.loader.exec_module(module)
            loaded[name] = module
        yield loaded


NIAH_TEMPLATE = (
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz "
    "you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} "
    "mentioned in the provided text?"
)
"""lm_eval/tasks/ruler/niah_utils.py, which cannot be imported without a download."""


@pytest.mark.parametrize(("keys", "queries", "values"), [(1, 1, 1), (4, 1, 1), (1, 1, 4), (4, 4, 1)])
def test_needle_questions_are_those_of_the_harness(
    harness: dict[str, Any], keys: int, queries: int, values: int
) -> None:
    theirs, answers, query = harness["prepare_niah"].generate_input_output(
        30,
        harness["prepare_niah"].get_haystack("repeat"),
        type_haystack="repeat",
        num_needle_k=keys,
        type_needle_k="words",
        num_needle_v=values,
        type_needle_v="numbers",
        template=NIAH_TEMPLATE,
        num_needle_q=queries,
    )
    asked = re.split(r", and |, ", query)
    frame = needle_frame(asked, len(answers), "numbers")
    assert theirs.startswith(frame.before)
    assert theirs.endswith(frame.after)
    ours = TASKS["niah_single"].text(30, 4096, random.Random(0), [])
    lines = theirs.removeprefix(frame.before).removesuffix(frame.after).split("\n")
    sentences = [line for line in lines if line.startswith("One of")]
    assert set(lines) - set(sentences) == {line for line in ours.context.split("\n") if not line.startswith("One of")}
    assert len(lines) == 30 + keys * values
    if values == 1:
        assert {needle_sentence(key, value, "numbers") for key, value in zip(asked, answers, strict=True)} <= {
            *sentences
        }
    source = (Path(harness["prepare_niah"].__file__)).read_text()
    begins = "The special magic {type_needle_v} for {query} mentioned in the provided text are"
    assert begins in source
    if len(answers) > 1:
        assert frame.answer == begins.format(type_needle_v="numbers", query=query)


def template_of(text: str) -> str:
    """The text with what is drawn replaced."""
    text = re.sub(r"\b[A-Z]{3,5}\b(?= =|\s|$)", lambda found: found[0] if found[0] == "VAR" else "NAME", text)
    return re.sub(r"\d+", "0", text)


def test_variable_tracking_is_that_of_the_harness(harness: dict[str, Any]) -> None:
    theirs, _ = harness["vt_utils"].generate_input_output(12, 1, 4)
    ours = TASKS["vt"].text(12, 4096, random.Random(0), [])
    mine = f"{ours.before}{ours.context}{ours.after} {ours.prefix} "
    noise = re.compile(r"The grass is green\.[^\n]*back again\.\n ?|VAR \w+ = (VAR )?\w+ *")
    assert template_of(noise.sub("", theirs)) == template_of(noise.sub("", mine))
    for pattern in (r"The grass is green\. .*?again\.", r"VAR NAME = VAR NAME ", r"VAR NAME = 0"):
        assert len(re.findall(pattern, template_of(theirs))) == len(re.findall(pattern, template_of(mine)))
    # The example before the task is one of three letters, solved.
    assert re.search(r"they are:  [A-Z]{3}( [A-Z]{3}){4}\n\n\n\n$", ours.example)


def test_word_tasks_are_those_of_the_harness(harness: dict[str, Any]) -> None:
    example, theirs, answers = harness["cwe_utils"].generate_input_output(30, 2048)
    ours = TASKS["cwe"].text(30, 2048, random.Random(0), [])
    words = re.compile(r"\d+\. [^\d\n]*")
    for text, mine in ((theirs, f"{ours.before}{ours.context}{ours.after} {ours.prefix}"), (example, ours.example)):
        assert words.sub("#", text).rstrip("\n") == words.sub("#", mine).rstrip("\n")
    assert len(answers) == len(ours.references) == 10

    class Letters:
        """Counts letters as tokens."""

        def __call__(self, text: str) -> Any:
            return types.SimpleNamespace(input_ids=text)

    theirs, answers, size = harness["fwe_utils"].generate_input_output(
        4096, Letters(), vocab_size=4096 // 50, incremental=128
    )
    frequent = TASKS["fwe"].text(size, 4096, random.Random(0), [])
    coded = re.compile(r"((\b[a-z]{6}|\.\.\.)( |(?=\n)))+")
    mine = f"{frequent.before}{frequent.context}{frequent.after} {frequent.prefix}"
    assert theirs[:60] == mine[:60]
    assert theirs[theirs.index("\nQuestion") :] == mine[mine.index("\nQuestion") :]
    assert len(answers) == len(frequent.references) == 3
    inside = theirs[len(frequent.before) : theirs.index("\nQuestion")].split()
    counts = sorted(map(inside.count, set(inside)))
    assert counts == sorted(map(frequent.context.split().count, set(frequent.context.split())))
    assert coded.search(mine)
    assert harness["common_utils"].string_match_all(["it is AbC"], [["abc", "x"]]) == found_share(
        "it is AbC", ["abc", "x"]
    )


def test_a_model_that_reads_gets_full_marks_and_an_untrained_one_nothing(texts: Path, alone: World) -> None:
    tasks = ["niah_single", "niah_multikey", "niah_multiquery", "niah_multivalue"]
    section = {"tasks": tasks, "samples": 2, "lengths": [1024]}
    config = recipe(texts, 1024, {"ruler": section})
    evaluation = built(Ruler, config)
    found = evaluation.run(context(config, Reader(config, sight=1024)))
    assert found.numbers == {"ruler": 1.0, **{f"ruler_{task}": 1.0 for task in tasks}}
    assert found.data["scores"]["full"]["teacher_forced"]["niah_multiquery"] == [1.0]
    model = Transformer(config.model)
    initialize_weights(model, 0)
    nothing = evaluation.run(context(config, model)).numbers
    assert max(nothing.values()) < 0.1


def test_generated_answers_are_scored_as_ruler_does(texts: Path, alone: World) -> None:
    section = {"tasks": ["niah_single", "vt"], "samples": 1, "lengths": [1024], "scoring": "generated"}
    config = recipe(texts, 1024, {"ruler": section | {"attention": "own"}})
    evaluation = built(Ruler, config)
    found = evaluation.run(context(config, Reader(config, sight=1024)))
    assert found.numbers == {"ruler": 0.5, "ruler_niah_single": 1.0, "ruler_vt": 0.0}
    assert found.data["scoring"] == "generated"
    assert found.data["scores"]["moba"]["generated"] == {"niah_single": [1.0], "vt": [0.0]}


@pytest.mark.parametrize(
    ("section", "keys", "problem"),
    [
        ({"tasks": ["niah_singel"]}, {}, r"evaluation.ruler.tasks: given 'niah_singel' .did you mean 'niah_single'"),
        ({"lengths": ["8K"]}, {}, r"evaluation.ruler.lengths: given 8192; allowed: at most 3072"),
        ({"scoring": "generated"}, {"parallel": {"tp": 2}}, r"evaluation.ruler.scoring: given 'generated', which"),
        ({"tasks": ["vt"]}, {"data": {"train": [{"path": "a"}]}}, r"evaluation.ruler: needs the model's tokenizer"),
        (
            {},
            {"data": {"train": [{"path": "a"}], "tokenizer": "t"}},
            r"tasks: niah_multikey, .* but there is none; set data.validation, or leave",
        ),
        (
            {"tasks": ["vt"]},
            {
                "stages": [
                    {
                        "name": "only",
                        "seq_len": LENGTH,
                        "tokens": LENGTH,
                        "until": {"metric": "ruler_cwe", "at_least": 0.5, "max_tokens": 2 * LENGTH},
                    }
                ]
            },
            r"until.metric: ruler_cwe is not evaluated; add cwe to evaluation.ruler.tasks",
        ),
    ],
)
def test_recipes_that_cannot_work_are_refused_by_key(
    texts: Path, section: dict[str, Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(recipe(texts, LENGTH, {"ruler": section}, **keys))


def test_a_length_that_a_task_does_not_fit_in_is_refused(texts: Path) -> None:
    with pytest.raises(DataError, match=r"evaluation.ruler.lengths: given 256; the shortest sample of cwe has \d+ tok"):
        texts_of(texts, tasks=["cwe"], lengths=[256]).questions("cwe", 256)
    config = recipe(texts, 128, {"ruler": {}})
    assert "lengths: given 128; the shortest sample of niah_single has" in built(Ruler, config).missing


def test_numbers_are_means_over_lengths_and_tasks(texts: Path, alone: World) -> None:
    torch.manual_seed(0)
    section = {"tasks": ["niah_single"], "samples": 2, "lengths": [512, 1024]}
    config = recipe(texts, 1024, {"ruler": section})
    evaluation = built(Ruler, config)
    found = evaluation.run(context(config, Reader(config, sight=400)))
    scores = found.data["scores"]["moba"]["teacher_forced"]["niah_single"]
    assert found.numbers["ruler"] == pytest.approx(sum(scores) / 2)
    assert any("1K" in line and "512" in line for line in found.table)


def test_depths_are_those_of_ruler() -> None:
    """RULER's `np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int)`."""
    assert np.linspace(0, 100, num=40).round().tolist() == DEPTHS
