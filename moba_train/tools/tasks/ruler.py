"""RULER's tasks: long texts with a question, made from a seed without downloads, and a model's scores on them.

Tasks, prompt templates and their numbers are those of RULER (Hsieh et al. 2024, arXiv:2404.06654; NVIDIA,
github.com/NVIDIA/RULER, Apache-2.0), misspellings included, because scores can only be compared if the words are the
same. Text of the validation corpus replaces RULER's essays, and tools/needle/haystack.py its word package.
"""

import math
import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from moba_train.evals.evaluation import EvaluationSetting
from moba_train.tools.needle.haystack import (
    NOISE,
    SINGLE_WORDS,
    WORDS,
    ValueType,
    draw_keys,
    draw_values,
    needle_frame,
    needle_sentence,
    separated,
)
from moba_train.tools.tasks.scored import TaskScores
from moba_train.tools.tasks.sized import SizedTask, TasksConfig, TaskText

DEPTHS = [round(100 * step / 39) for step in range(40)]
"""Depths at which RULER hides needles in natural text, in % of its sentences."""


@dataclass(frozen=True)
class Niah(SizedTask):
    """Needles in a haystack."""

    haystack: str
    """Text around the needles: "noise" for repeated sentences, "text" for the corpus, "needles" for other needles."""
    keys: int = 1
    """Keys that are hidden."""
    queries: int = 1
    """Keys that are asked for."""
    values: int = 1
    """Values of each key."""
    key_type: str = "words"
    value_type: ValueType = "numbers"

    tokens_to_generate = 128

    @property
    def natural(self) -> bool:
        """True if the haystack is text of the corpus."""
        return self.haystack == "text"

    @property
    def least(self) -> int:
        """A place for every needle."""
        return self.keys * self.values

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """Needles between `size` words of text, or `size` sentences."""
        keys = self._keys(self.keys, rng)
        values = {key: draw_values(self.values, self.value_type, rng) for key in keys}
        needles = [needle_sentence(key, value, self.value_type) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        context = (
            self._in_text(words[:size], needles, rng) if self.natural else self._in_lines(size, keys, needles, rng)
        )
        # A key's values in the order of the text, which is the order to give them in where answers are teacher-forced.
        found = [value for key in asked for value in sorted(values[key], key=context.index)]
        frame = needle_frame(asked, len(found), self.value_type)
        return TaskText(frame.before, context, frame.after, frame.answer, separated(found))

    def _keys(self, count: int, rng: random.Random) -> list[str]:
        return draw_keys(count, rng) if self.key_type == "words" else draw_values(count, "uuids", rng)

    def _in_text(self, words: Sequence[str], needles: Sequence[str], rng: random.Random) -> str:
        """The needles between sentences, at different depths."""
        sentences = re.split(r"(?<=[.!?]) ", " ".join(words))
        places = sorted(int(len(sentences) * depth / 100) for depth in rng.sample(DEPTHS, len(needles)))
        for place, needle in reversed([*zip(places, needles, strict=True)]):
            sentences.insert(place, needle)
        return " ".join(sentences)

    def _other_key(self, keys: Sequence[str], rng: random.Random) -> str:
        """A key that is none of the `keys`, which must have the values of their needles only."""
        while (key := self._keys(1, rng)[0]) in keys:
            pass
        return key

    def _in_lines(self, size: int, keys: Sequence[str], needles: Sequence[str], rng: random.Random) -> str:
        """The needles of these keys among lines, all at different places."""
        lines = [NOISE] * size
        if self.haystack == "needles":
            others = [(self._other_key(keys, rng), draw_values(1, self.value_type, rng)[0]) for _ in range(size)]
            lines = [needle_sentence(key, value, self.value_type) for key, value in others]
        for place, needle in zip(sorted(rng.sample(range(size), len(needles)), reverse=True), needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


@dataclass(frozen=True)
class VariableTracking(SizedTask):
    """A chain of assignments between repeated sentences; all variables of the chain are asked for."""

    hops: int = 4
    letters: int = 5
    """Letters of a variable's name."""

    tokens_to_generate = 30

    @property
    def least(self) -> int:
        """A line for every assignment, and one more."""
        return 6

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """The chain among `size` lines, after an example of ten lines."""
        question = self._question(size, self.letters, rng)
        example = self._question(10, 3, rng)
        solved = f"{_joined(example)} {example.prefix}  {' '.join(example.references)}\n\n\n\n"
        return replace(question, example=solved)

    def _question(self, size: int, letters: int, rng: random.Random) -> TaskText:
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        chain = [*names]
        value = str(rng.randint(10000, 99998))
        assignments = [f"VAR {chain[0]} = {value}"]
        assignments += [f"VAR {chain[hop + 1]} = VAR {chain[hop]} " for hop in range(self.hops)]
        lines = [NOISE + "\n"] * size
        for number, place in enumerate(sorted(rng.sample(range(size), len(assignments)))):
            lines.insert(place + number, assignments[number])
        context = " ".join(lines).replace(". \n", ".\n")
        return TaskText(
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
            context,
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(chain)} variables are assgined the value {value}, they are:",
            separated(chain, comma=""),
        )


@dataclass(frozen=True)
class CommonWords(SizedTask):
    """A numbered list of words; ten of them are much more common than the others, and asked for."""

    common: int = 10

    tokens_to_generate = 120

    @property
    def least(self) -> int:
        """The common words and one other."""
        return 11

    def most(self, length: int, words: Sequence[str]) -> int:
        """Different words."""
        return len(WORDS)

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """`size` different words, after an example with 20, or with 40 from 4096 tokens on."""
        short = length < 4096
        example = self._question(20 if short else 40, *((3, 1) if short else (10, 3)), rng)
        question = self._question(size, *((6, 1) if short else (30, 3)), rng)
        solved = f"{_joined(example)} {example.prefix}{_numbered(example.references)}\n"
        return replace(question, example=solved)

    def _question(self, size: int, common: int, others: int, rng: random.Random) -> TaskText:
        drawn = rng.sample(WORDS[: max(size, SINGLE_WORDS)], size)
        listed = drawn[: self.common] * common + drawn[self.common :] * others
        rng.shuffle(listed)
        answers = sorted(drawn[: self.common], key=listed.index)
        parts = [part for at, word in enumerate(answers) for part in ((f" {at + 1}.", False), (f" {word}", True))]
        return TaskText(
            "Below is a numbered list of words. In these words, some appear more often than others. "
            "Memorize the ones that appear most often.\n",
            _numbered(listed),
            f"\nQuestion: What are the {self.common} most common words in the above list?",
            f"Answer: The top {self.common} words that appear most often in the list are:",
            parts,
        )


@dataclass(frozen=True)
class FrequentWords(SizedTask):
    """Coded words, as frequent as a zeta distribution has them; the three most frequent are asked for."""

    letters: int = 6
    alpha: float = 2.0
    asked: int = 3
    zeta: float = field(default=math.pi**2 / 6)
    """Sum of `rank ** -alpha` over all ranks."""

    tokens_to_generate = 50

    @property
    def least(self) -> int:
        """Enough for the frequent words to differ in number."""
        return 60

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """About `size` coded words, the most frequent of which is noise."""
        coded: dict[str, None] = {"...": None}
        while len(coded) < max(length // 50, self.asked + 2):
            coded["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        listed = [
            word for rank, word in enumerate(coded, start=1) for _ in range(int(size * rank**-self.alpha / self.zeta))
        ]
        rng.shuffle(listed)
        return TaskText(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. ",
            " ".join(listed),
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?",
            "Answer: According to the coded text above, the three most frequently appeared words are:",
            separated([*coded][1 : 1 + self.asked]),
        )


TASKS: dict[str, SizedTask] = {
    "niah_single": Niah("noise"),
    "niah_single_2": Niah("text"),
    "niah_single_3": Niah("text", value_type="uuids"),
    "niah_multikey": Niah("text", keys=4),
    "niah_multikey_2": Niah("needles"),
    "niah_multikey_3": Niah("needles", key_type="uuids", value_type="uuids"),
    "niah_multivalue": Niah("text", values=4),
    "niah_multiquery": Niah("text", keys=4, queries=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
"""Every task by its name in RULER, except that niah_single and niah_multikey are niah_single_1 and niah_multikey_1
there."""


def _joined(question: TaskText) -> str:
    return question.before + question.context + question.after


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


class RulerConfig(TasksConfig):
    """RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654), made here without downloads. See docs/how-to/evaluate.md."""

    tasks: list[str] = Field(
        ["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"],
        min_length=1,
        description="tasks by name; there are also niah_single_2, niah_single_3, niah_multikey_2 and niah_multikey_3",
    )
    scoring: Literal["teacher_forced", "generated"] = Field(
        "teacher_forced",
        description="answers that the numbers are about; generated: RULER's own score, by greedy generation, which "
        "needs parallel.tp and pp 1; teacher_forced: the most likely tokens given the right ones before them, in one "
        "forward pass",
    )


class Ruler(TaskScores[RulerConfig]):
    """Mean score over the lengths, of each task and of all tasks."""

    name = "ruler"
    Options = RulerConfig
    data_name = "ruler_scores"
    made = TASKS
    numbers = frozenset({"ruler", *(f"ruler_{task}" for task in TASKS)})

    @classmethod
    def problems(cls, options: RulerConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Those of all tasks, and tasks in natural text without any."""
        yield from super().problems(options, setting)
        natural = [task for task in options.tasks if task in TASKS and TASKS[task].natural]
        if natural and not setting.validation:
            yield (
                f"{cls.key}.tasks: {', '.join(natural)} hide needles in natural text, but there is none; set "
                "data.validation, or leave these tasks out"
            )
