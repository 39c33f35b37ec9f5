"""Metrics of answers: those of the packages that others use, and of examples counted by hand."""

import math
import random
import sys
from types import ModuleType

import pytest

from moba_train.tools.tasks.metrics import METRICS, accuracy, beginning, f1, ndcg_10, normalized, rouge_l


@pytest.mark.parametrize(
    ("metric", "answer", "references", "score"),
    [
        ("exact_match", "The Eiffel-Tower!", ["a tower", "eiffeltower"], 1.0),
        ("exact_match", "Eiffel Tower in Paris", ["Eiffel Tower"], 0.0),
        ("substring_exact_match", "It is the Eiffel Tower, in Paris.", ["Big Ben", "eiffel tower"], 1.0),
        ("substring_exact_match", "It is Big", ["Big Ben"], 0.0),
        ("all_found", "7 and 12", ["7", "12", "30"], 2 / 3),
        ("f1", "a red fox and an old dog", ["the red fox", "cats"], 2 * (2 / 5) * 1 / (2 / 5 + 1)),
        ("f1", "red red fox", ["red fox fox"], 2 / 3),
        ("f1", "", ["fox"], 0.0),
        ("rouge_l", "the dog sat on the mat", ["the cat sat on a mat"], 2 * 4 / 12),
        ("rouge_l", "nothing", ["else", "nothing at all"], 2 * 1 / 4),
        ("rouge_l", "", ["fox"], 0.0),
    ],
)
def test_scores_are_those_counted_by_hand(metric: str, answer: str, references: list[str], score: float) -> None:
    assert METRICS[metric](answer, references, []) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "score"),
    [(" 3", 1.0), ("label: 3\n\nlabel: 12", 1.0), ("13", 0.0), ("12, or 3", 0.0), ("three", 0.0), ("", 0.0)],
)
def test_the_first_label_of_an_answer_counts(answer: str, score: float) -> None:
    assert accuracy(answer, ["3"], ["1", "12", "3"]) == score


def test_of_labels_that_begin_together_the_longest_counts() -> None:
    labels = ["New York", "New York City", "not-spam", "spam"]
    assert accuracy("new york city.", ["New York City"], labels) == 1
    assert accuracy("not-spam", ["spam"], labels) == 0


def test_the_order_of_passages_counts() -> None:
    assert ndcg_10("[12] > [7] > 31", ["12", "7", "31"]) == 1
    best = 3 + 2 / math.log2(3) + 1 / math.log2(4)
    assert ndcg_10("99 > 7 > 7 > 12", ["12", "7", "31"]) == pytest.approx((2 / math.log2(3) + 3 / math.log2(4)) / best)
    assert ndcg_10(" > ".join(map(str, range(100, 110))) + " > 12", ["12"]) == 0, "the eleventh"
    assert ndcg_10("no numbers", ["12"]) == 0


def test_an_answer_ends_where_its_task_says() -> None:
    assert beginning("\n Paris \nQuestion: x", "\n") == "Paris"
    assert beginning(" two\nlines ", None) == "two\nlines"


def test_words_are_those_of_squad() -> None:
    assert normalized("  The  U.S. of an  (old) A-team ") == "us of old ateam"


def texts() -> list[tuple[str, str]]:
    rng = random.Random(0)
    words = ["a", "b", "c", "d-e", "f's", "12", "Fox", "dogs"]
    return [tuple(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2)) for _ in range(30)]  # type: ignore[misc]


def test_rouge_is_that_of_google(monkeypatch: pytest.MonkeyPatch) -> None:
    # A large package, from which rouge-score takes a stemmer that is not used here.
    nltk = ModuleType("nltk")
    vars(nltk)["stem"] = nltk
    vars(nltk)["porter"] = nltk
    for name in ("nltk", "nltk.stem", "nltk.stem.porter"):
        monkeypatch.setitem(sys.modules, name, nltk)
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=False)
    for answer, reference in texts():
        assert rouge_l(answer, [reference]) == pytest.approx(scorer.score(reference, answer)["rougeL"].fmeasure)


def test_f1_is_that_of_a_reference_which_counts_words() -> None:
    for answer, reference in texts():
        given, wanted = normalized(answer).split(), normalized(reference).split()
        common = sum(min(given.count(word), wanted.count(word)) for word in {*given})
        expected = 2 / (len(given) / common + len(wanted) / common) if common else 0
        assert f1(answer, [reference]) == pytest.approx(expected)
