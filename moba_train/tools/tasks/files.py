"""Tasks from local files, one JSON object a line; docs/how-to/evaluate.md describes the format.

The names `input` and `all_classes`, and the fields that are ignored, are LongBench's, so that its files can be read.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, model_validator

from moba_train.config.base import Section
from moba_train.config.explain import did_you_mean, explain
from moba_train.errors import DataError, ForeignFileError
from moba_train.foreign_files import MIB, parse_json, read_foreign
from moba_train.tools.needle.haystack import separated
from moba_train.tools.tasks.metrics import METRICS, beginning
from moba_train.tools.tasks.sized import TaskText

FILE_BYTES = 1024 * MIB
"""Largest file of a task."""
OF_A_SAMPLE = ("context", "question", "input", "answers")
"""Fields that the first line does not have if it holds values for all lines."""
IGNORED = ("_id", "dataset", "id", "language", "length")

Text = Annotated[str, Field(min_length=1)]


class Demonstration(Section):
    """A question with its answer, which a prompt shows before its own question."""

    context: str = ""
    question: str = Field("", validation_alias=AliasChoices("question", "input"))
    answer: Text


class TaskLine(Section):
    """A sample of a task."""

    context: Text
    """The long text."""
    question: str = Field("", validation_alias=AliasChoices("question", "input"))
    answers: Annotated[
        list[Text], BeforeValidator(lambda given: [given] if isinstance(given, str) else given), Field(min_length=1)
    ]
    """Right answers; of `all_found` all parts of one, of `ndcg_10` numbers of passages, best first."""
    metric: str
    template: str = "{context}\n\n{demonstrations}Question: {question}"
    """The prompt; the placeholders are replaced."""
    prefix: str = "\nAnswer:"
    """Beginning of the answer, at the end of the prompt; in a chat, of the assistant's message."""
    demonstration: str = "Question: {question}\nAnswer: {answer}\n\n"
    """One demonstration."""
    demonstrations: list[Demonstration] = []
    labels: Annotated[list[Text], BeforeValidator(lambda given: given or [])] = Field(
        [], validation_alias=AliasChoices("labels", "all_classes")
    )
    """Labels that `accuracy` looks for; LongBench has null where there are none."""
    max_new_tokens: int = Field(32, ge=1, le=65_536)
    """Tokens of a generated answer, at most, which are part of the length."""
    stop: Text | None = "\n"
    """Text that ends an answer; null: none."""

    @model_validator(mode="after")
    def _check(self) -> "TaskLine":
        if self.metric not in METRICS:
            hint = did_you_mean(self.metric, [*METRICS])
            raise ValueError(f"metric: given {self.metric!r}{hint}; allowed: {', '.join(METRICS)}")
        if self.template.count("{context}") != 1:
            raise ValueError("template: allowed: a text with {context} once")
        if self.question and "{question}" not in self.template:
            raise ValueError("template: has no {question}, but the line has a question")
        if self.metric == "accuracy" and not set(self.answers) <= set(self.labels):
            raise ValueError(
                f"answers: given {self.answers}; allowed with metric accuracy: some of labels {self.labels}"
            )
        if self.metric == "ndcg_10" and not all(re.fullmatch(r"\d+", answer) for answer in self.answers):
            raise ValueError(f"answers: given {self.answers}; allowed with metric ndcg_10: whole numbers, best first")
        return self

    def text(self, context: str) -> TaskText:
        """The prompt with this context."""
        shown = "".join(
            filled(self.demonstration, context=one.context, question=one.question, answer=one.answer)
            for one in self.demonstrations
        )
        before, after = (
            filled(part, question=self.question, demonstrations=shown) for part in self.template.split("{context}")
        )
        wanted = self.answers if self.metric in ("all_found", "ndcg_10") else self.answers[:1]
        answer = separated(wanted, " >" if self.metric == "ndcg_10" else ",")
        return TaskText(before, context, after, self.prefix, answer)

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Score of a generated answer."""
        return METRICS[self.metric](beginning(answer, self.stop), self.answers, self.labels)


def filled(template: str, **values: str) -> str:
    """The template with these placeholders replaced at once, so that values may hold braces."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in values), lambda found: values[found[0][1:-1]], template)


def read_tasks(path: str, key: str, most: int) -> list[TaskLine]:
    """The first `most` samples in a file; all of its lines are checked. `key` names the file in messages. Raises
    DataError, with the number of the line, for what is no sample."""
    try:
        content = read_foreign(Path(path), FILE_BYTES)
    except (OSError, ForeignFileError) as error:
        raise DataError(f"{key}: given {path}, which cannot be read: {error}") from error
    found: list[TaskLine] = []
    of_all: dict[str, Any] = {}
    samples = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
            if not isinstance(values, dict):
                raise ValueError(f"given {type(values).__name__}; allowed: an object of JSON")
            json.dumps(values, ensure_ascii=False).encode()  # half a character, which JSON can spell, is no text
            values = {name: value for name, value in values.items() if name not in IGNORED}
            if not of_all and not samples and values.keys().isdisjoint(OF_A_SAMPLE):
                of_all = values
                continue
            sample = TaskLine.model_validate(of_all | values)
        except ValidationError as error:
            problems = "; ".join(text.removeprefix("the recipe: ") for text in explain(error, TaskLine))
            raise DataError(f"{key}: {path}, line {number}: {problems}") from error
        except ValueError as error:
            raise DataError(f"{key}: {path}, line {number}: {error}") from error
        samples += 1
        if len(found) < most:
            found.append(sample)
    if not found:
        raise DataError(f"{key}: {path} has no sample; allowed: a line with context, answers and metric for each")
    return found
