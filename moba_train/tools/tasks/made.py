"""Three tasks of our own, in the manner of HELMET (Yen et al. 2024, arXiv:2410.02694): recall, classification by many
examples, ranking of passages. They are made of random words for any length: nothing is downloaded, and no model has
seen them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.tools.needle.haystack import ADJECTIVES, NOUNS, VERBS, draw_keys, draw_values, separated
from moba_train.tools.tasks.metrics import accuracy, beginning, ndcg_10, substring_exact_match
from moba_train.tools.tasks.sized import SizedTask, TaskText


@dataclass(frozen=True)
class JsonKeyValue(SizedTask):
    """Number of a name in a JSON object of names and numbers, after two other names with theirs as examples."""

    tokens_to_generate = 16

    @property
    def least(self) -> int:
        """The key that is asked for, two examples and another one."""
        return 4

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """An object of `size` keys."""
        pairs = [*zip(draw_keys(size, rng), draw_values(size, "numbers", rng), strict=True)]
        (key, value), *examples = rng.sample(pairs, 3)
        shown = "".join(f"\n\nKey: {one}\nCorresponding value: {other}" for one, other in examples)
        return TaskText(
            "Extract the value that corresponds to the given key in the JSON object below.\n\n",
            "{" + ",\n".join(f'"{one}": "{other}"' for one, other in pairs) + "}",
            f"{shown}\n\nKey: {key}",
            "\nCorresponding value:",
            [(f" {value}", True)],
        )

    def score(self, answer: str, references: Sequence[str]) -> float:
        """1 if the first line has the value."""
        return substring_exact_match(beginning(answer, "\n"), references)


@dataclass(frozen=True)
class ManyShot(SizedTask):
    """Label of a sentence: that of its noun, which other sentences show, four of each as long as there are nouns. Nouns
    have other labels in each sample."""

    labels: int = 6

    tokens_to_generate = 6

    @property
    def least(self) -> int:
        """As many examples as labels."""
        return self.labels

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """`size` examples."""
        nouns = rng.sample(NOUNS, min(len(NOUNS), max(self.labels, size // 4)))
        label_of = {noun: str(index % self.labels) for index, noun in enumerate(nouns)}
        shown = rng.choices(nouns, k=size)
        asked = rng.choice(shown)
        return TaskText(
            "Every sentence below has a label, which depends on its noun. Give the label of the last sentence.\n\n",
            "\n\n".join(f"{self._sentence(noun, rng)}\nLabel: {label_of[noun]}" for noun in shown),
            f"\n\n{self._sentence(asked, rng)}",
            "\nLabel:",
            [(f" {label_of[asked]}", True)],
        )

    def _sentence(self, noun: str, rng: random.Random) -> str:
        first, second = rng.sample(VERBS, 2)
        return f"The {rng.choice(ADJECTIVES)} {noun} will {first} today and {second} tomorrow."

    def score(self, answer: str, references: Sequence[str]) -> float:
        """1 if the first label of the answer is right."""
        return accuracy(answer, references, [str(label) for label in range(self.labels)])


@dataclass(frozen=True)
class Rerank(SizedTask):
    """Passages with numbers, to be ranked by the words of a query in them: one has all four words, one three, one two
    and one a single one; the others have none."""

    asked: int = 4

    tokens_to_generate = 32

    @property
    def least(self) -> int:
        """The passages with words of the query, and another one."""
        return self.asked + 1

    def text(self, size: int, length: int, rng: random.Random, words: Sequence[str]) -> TaskText:
        """`size` passages."""
        query = rng.sample(ADJECTIVES, self.asked)
        others = [word for word in ADJECTIVES if word not in query]
        numbers = [str(number) for number in rng.sample(range(10, 10 + 10 * size), size)]
        ranked = rng.sample(numbers, self.asked)
        passages = []
        for number in numbers:
            found = rng.sample(query, self.asked - ranked.index(number) if number in ranked else 0)
            described = found + rng.sample(others, 6 - len(found))
            rng.shuffle(described)
            things = [f"{word} {noun}" for word, noun in zip(described, rng.sample(NOUNS, 6), strict=True)]
            first, second = rng.sample(VERBS, 2)
            passages.append(
                f"[{number}] The {things[0]} and the {things[1]} {first} behind the {things[2]}. "
                f"The {things[3]} and the {things[4]} {second} near the {things[5]}."
            )
        return TaskText(
            "Rank the passages below by how many words of the query they have.\n\n",
            "\n".join(passages),
            f"\n\nQuery: {', '.join(query)}\nThe four best passages, best first, written as [31] > [12] > [57] > [40]:",
            "\nRanking:",
            separated([f"[{number}]" for number in ranked], " >"),
        )

    def score(self, answer: str, references: Sequence[str]) -> float:
        """NDCG@10 of the numbers in the first line."""
        return ndcg_10(beginning(answer, "\n"), [reference.strip("[]") for reference in references])


MADE: dict[str, SizedTask] = {"json_kv": JsonKeyValue(), "many_shot": ManyShot(), "rerank": Rerank()}
"""The tasks by name."""
