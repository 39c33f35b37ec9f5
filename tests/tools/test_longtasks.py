"""Long tasks: our own have the right answers, files are read and cut as asked, and bad lines are refused by number."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from moba_train.errors import ConfigError, DataError
from moba_train.parallel.world import World
from moba_train.tools.needle.answers import generated_answers
from moba_train.tools.report.chart import shown
from moba_train.tools.report.evaluation_charts import task_charts
from moba_train.tools.report.history import History, Result
from moba_train.tools.tasks.files import read_tasks
from moba_train.tools.tasks.longtasks import LongTasks, LongTasksConfig, LongTaskTexts
from moba_train.tools.tasks.made import MADE
from moba_train.tools.text_tokenizer import load_tokenizer
from tests.evals.setting import built, stage_setting
from tests.resolved import check
from tests.tools.questions import PROSE, Reader, context, recipe

LENGTH = 4096
SAMPLE = {"context": "The fox sleeps.", "question": "Who sleeps?", "answers": ["the fox"], "metric": "f1"}


def texts_of(texts: Path, **section: Any) -> LongTaskTexts:
    config = recipe(texts, LENGTH, {"longtasks": section})
    options = config.evaluation.options_of("longtasks")
    assert isinstance(options, LongTasksConfig)
    return LongTasks.texts(options, stage_setting(config))


def write(folder: Path, *lines: dict[str, Any], name: str = "own") -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("task", MADE)
def test_our_own_samples_fill_their_length_and_the_right_answer_gets_full_marks(texts: Path, task: str) -> None:
    made = texts_of(texts, tasks=[task], samples=2)
    first, second = made.questions(task, LENGTH)
    assert first.question.tokens != second.question.tokens
    assert made.questions(task, LENGTH) == [first, second]
    for prompt in (first, second):
        question = prompt.question
        room = LENGTH - MADE[task].tokens_to_generate
        assert 0.9 * room < question.prompt_length <= LENGTH
        answer = made.tokenizer.decode(question.tokens[question.prompt_length :])
        assert prompt.score(answer, prompt.references) == 1
        assert prompt.score(f"{answer}\n\nKey: 1", prompt.references) == 1, "the model goes on"
        assert prompt.score("I do not know", prompt.references) == 0
        assert not made.tokenizer.decode(question.prompt).endswith(answer)


def test_the_right_answers_follow_from_the_texts() -> None:
    rng = random.Random(0)
    for _ in range(5):
        recall = MADE["json_kv"].text(30, LENGTH, rng, [])
        key = re.findall(r"Key: (\S+)", recall.after)[-1]
        assert [json.loads(recall.context)[key]] == recall.references
        for example, value in re.findall(r"Key: (\S+)\nCorresponding value: (\S+)", recall.after):
            assert example != key
            assert json.loads(recall.context)[example] == value
        shots = MADE["many_shot"].text(200, LENGTH, rng, [])
        noun = re.search(r"The \S+ (\S+) will", shots.after)
        assert noun is not None
        assert {*re.findall(rf"The \S+ {noun[1]} will .*\nLabel: (\d)", shots.context)} == {*shots.references}
        ranked = MADE["rerank"].text(60, LENGTH, rng, [])
        query = set(re.findall(r"\w+", ranked.after.split("\n")[2].removeprefix("Query:")))
        hits = {
            number: len(query & set(re.findall(r"\w+", text)))
            for number, text in re.findall(r"\[(\d+)\](.*)", ranked.context)
        }
        assert sorted(hits.values())[-5:] == [0, 1, 2, 3, 4]
        assert sorted(hits, key=lambda number: -hits[number])[:4] == [text.strip("[]") for text in ranked.references]


def test_a_file_gives_its_prompts_with_template_and_demonstrations(texts: Path, tmp_path: Path) -> None:
    shown = [{"question": "Who runs?", "answer": "dogs {question}"}]
    path = write(
        tmp_path, {"metric": "f1", "demonstrations": shown, "max_new_tokens": 7}, SAMPLE | {"context": "A {question}."}
    )
    made = texts_of(texts, tasks=[path])
    (prompt,) = made.questions(path, LENGTH)
    text = made.tokenizer.decode(prompt.question.prompt)
    assert text == "A {question}.\n\nQuestion: Who runs?\nAnswer: dogs {question}\n\nQuestion: Who sleeps?\nAnswer:"
    assert made.tokenizer.decode(prompt.question.tokens[prompt.question.prompt_length :]) == " the fox"
    assert prompt.most_tokens == 7
    assert prompt.score(" The fox!\nQuestion: Who", prompt.references) == 1
    # LongBench's names.
    line = {"context": "c", "input": "q", "answers": "yes", "all_classes": ["yes", "no"], "_id": 1, "length": 9}
    (own,) = read_tasks(write(tmp_path, line | {"metric": "accuracy"}), "key", 5)
    assert (own.question, own.answers, own.labels) == ("q", ["yes"], ["yes", "no"])
    (own,) = read_tasks(write(tmp_path, {"metric": "f1"}, line | {"all_classes": None}), "key", 5)
    assert own.labels == []


@pytest.mark.parametrize("truncate", ["end", "middle"])
def test_a_context_that_is_too_long_is_cut_and_the_question_stays(texts: Path, tmp_path: Path, truncate: str) -> None:
    long = " ".join(f"{number} {PROSE}" for number in range(60))
    path = write(tmp_path, SAMPLE | {"context": long, "max_new_tokens": 20}, SAMPLE)
    made = texts_of(texts, tasks=[path], truncate=truncate)
    cut, whole = made.questions(path, 512)
    assert made.questions(path, LENGTH)[1] == whole
    assert 512 - 20 - 8 <= cut.question.prompt_length <= 512 - 20
    text = made.tokenizer.decode(cut.question.prompt)
    assert text.startswith(f"0 {PROSE[:20]}")
    assert text.endswith("\n\nQuestion: Who sleeps?\nAnswer:")
    assert ("59 the quick" in text) == (truncate == "middle")
    assert "30 the quick" not in text
    assert made.excess(path, 24) > 0
    with pytest.raises(DataError, match=rf"longtasks.lengths: given 24; the shortest sample of {path} has"):
        made.questions(path, 24)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([SAMPLE, SAMPLE | {"metric": "f2"}], r"line 2: metric: given 'f2'; allowed: exact_match, .*ndcg_10"),
        ([{"metric": "f1"}, {"context": "a"}], r"line 2: answers: missing; allowed: non-empty list"),
        ([{key: value for key, value in SAMPLE.items() if key != "context"}], r"line 1: context: missing"),
        ([SAMPLE | {"answers": []}], r"line 1: answers: given \[\]; allowed: non-empty list"),
        ([SAMPLE | {"answers": [""]}], r"line 1: answers\[0\]: given ''; allowed: non-empty"),
        ([SAMPLE | {"contex": "b"}], r"line 1: contex: unknown key .did you mean 'context'"),
        ([SAMPLE | {"template": "{question}"}], r"line 1: template: allowed: a text with {context} once"),
        ([SAMPLE | {"template": "{context}"}], r"line 1: template: has no {question}"),
        ([SAMPLE | {"metric": "accuracy", "labels": ["a"]}], r"line 1: answers: given .*with metric accuracy"),
        ([SAMPLE | {"metric": "ndcg_10"}], r"line 1: answers: given .*ndcg_10: whole numbers"),
        ([SAMPLE | {"max_new_tokens": 0}], r"line 1: max_new_tokens: given 0; allowed: integer >= 1"),
        ([SAMPLE | {"question": "\ud800"}], r"line 1: 'utf-8' codec can't encode"),
        ([{"metric": "f1"}], r"has no sample"),
        ([[1]], r"line 1: given list; allowed: an object"),
    ],
)
def test_bad_lines_are_refused_by_number_and_field(texts: Path, tmp_path: Path, lines: list[Any], problem: str) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(DataError, match=rf"^evaluation.longtasks.tasks: {path},? {problem}"):
        texts_of(texts, tasks=[path], samples=1)


def test_files_that_cannot_be_read_and_lines_that_are_not_json_are_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"longtasks.tasks: given .*none.jsonl, which cannot be read: .*No such file"):
        texts_of(texts, tasks=[str(tmp_path / "none.jsonl")])
    (tmp_path / "own.jsonl").write_bytes(json.dumps(SAMPLE).encode() + b"\n\n{'context': \xff}\n")
    config = recipe(texts, LENGTH, {"longtasks": {"tasks": [str(tmp_path / "own.jsonl")]}})
    with pytest.raises(DataError, match=r"own.jsonl, line 3: is not JSON"):
        LongTasks.check_samples(config.evaluation.options_of("longtasks"), stage_setting(config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "keys", "problem"),
    [
        ({"tasks": ["json_kw"]}, {}, r"longtasks.tasks: given 'json_kw' .did you mean 'json_kv'"),
        (
            {"tasks": ["qa.json"]},
            {},
            r"longtasks.tasks: given 'qa.json'; allowed: .*, and files whose names end in .jsonl",
        ),
        ({"tasks": ["a/json_kv.jsonl", "json_kv"]}, {}, r"longtasks.tasks: 2 tasks are called json_kv; rename a file"),
        ({}, {"parallel": {"tp": 2}}, r"longtasks.scoring: given 'generated', which parallel.tp 2 cannot do"),
        ({"lengths": ["8K"]}, {}, r"evaluation.longtasks.lengths: given 8192; allowed: at most 4096"),
    ],
)
def test_recipes_that_cannot_work_are_refused_by_key(
    texts: Path, section: dict[str, Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(recipe(texts, LENGTH, {"longtasks": section}, **keys))


class Answers(Reader):
    """Says what follows the last appearance of the prompt's last word, as far back as `sight` tokens."""

    def next_token(self, read: list[int]) -> int:
        """Tokens of the value whose key is asked for, with a new line behind them."""
        text = self.tokenizer.decode(read)
        asked = re.search(r"Key: (\S+)\nCorresponding value:([^\n]*)$", text)
        value = asked and re.search(rf'"{asked[1]}": "([^"]+)"', text)
        if not asked or not value:
            return 0
        rest = f" {value[1]}\n".removeprefix(asked[2])
        return self.tokenizer.encode(f"value:{asked[2]}{rest}")[len(self.tokenizer.encode(f"value:{asked[2]}"))]


def test_a_model_that_reads_the_whole_text_recalls_and_one_that_does_not_fails(
    texts: Path, alone: World, tmp_path: Path
) -> None:
    own = write(tmp_path, SAMPLE | {"context": "no"}, name="own-file")
    section = {"tasks": ["json_kv", own], "samples": 2, "lengths": [1024], "answer": "full"}
    config = recipe(texts, 1024, {"longtasks": section})
    reader = context(config, Answers(config, sight=1024))
    found = built(LongTasks, config).run(reader)
    assert found.numbers == {"longtasks": 0.5, "longtasks_json_kv": 1.0, "longtasks_own-file": 0.0}
    assert [*found.data["scores"]] == ["moba", "moba, answers with full", "full"]
    assert found.data["scores"]["moba, answers with full"]["generated"]["json_kv"] == [1.0]
    (answer,) = found.data["first_answers"]["moba"]["json_kv"]
    assert re.match(r" ?\d{7}\n", answer)
    assert any(line.startswith("1 to 2 samples of each task and length") for line in found.table)
    result = Result("longtasks", 0, "only", 0.0, found.data, "evaluation.json")
    drawn = {chart.key: chart for chart in task_charts(shown([History(tmp_path, "run", results=[result])]))}
    assert drawn["longtasks-0-full-generated"].title == "Long tasks, full attention, generated"
    assert drawn["longtasks-0-full-generated"].traces[0]["z"] == [[1.0], [0.0]]
    tokenizer = load_tokenizer(str(config.data.tokenizer))
    asked = [prompt.question for prompt in texts_of(texts, tasks=["json_kv"], samples=1).questions("json_kv", 1024)]
    new_line = tokenizer.encode("value:\n")[-1]
    whole, cut = (generated_answers(reader, asked, 48, tokenizer, "", ends=ends)[0] for ends in ((), {new_line}))
    assert cut == whole[: whole.index(new_line)]
    blind = built(LongTasks, recipe(texts, 1024, {"longtasks": section | {"tasks": ["json_kv"]}}))
    assert blind.run(context(config, Answers(config, sight=60))).numbers["longtasks"] == 0
