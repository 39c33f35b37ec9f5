"""RULER's tasks on a model: share of the answers that it finds, by task and length of the context."""

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from moba_train.attention.layout import TokenRange
from moba_train.config.base import MOST_SAMPLES, format_count
from moba_train.config.explain import did_you_mean
from moba_train.errors import DataError
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.tools.needle.answers import Question, encode_segments, generated_answers, predicted_answers, share
from moba_train.tools.needle.full_answers import answer_modes, answer_problems
from moba_train.tools.needle.haystack import (
    Conversation,
    corpus_of,
    length_problems,
    natural_text,
    open_tokenizer,
    stage_lengths,
)
from moba_train.tools.needle.options import ANSWER, AnswersConfig
from moba_train.tools.ruler.ruler_tasks import TASKS, TaskText, found_share

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"


class RulerConfig(AnswersConfig):
    """RULER's tasks (Hsieh et al. 2024, arXiv:2404.06654), made here without downloads. See docs/how-to/evaluate.md."""

    tasks: list[str] = Field(
        ["niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"],
        min_length=1,
        description="tasks by name; there are also niah_single_2, niah_single_3, niah_multikey_2 and niah_multikey_3",
    )
    samples: int = Field(8, ge=1, le=MOST_SAMPLES, description="samples of each task and length")
    scoring: Literal["teacher_forced", "generated"] = Field(
        "teacher_forced",
        description="answers that the numbers are about; generated: RULER's own score, by greedy generation, which "
        "needs parallel.tp and pp 1; teacher_forced: the most likely tokens given the right ones before them, in one "
        "forward pass",
    )
    answer: Literal["own", "full"] = ANSWER


class Ruler(Evaluation[RulerConfig]):
    """Mean score over the lengths, of each task and of all tasks."""

    name = "ruler"
    Options = RulerConfig
    data_name = "ruler_scores"
    numbers = frozenset({"ruler", *(f"ruler_{task}" for task in TASKS)})

    def __init__(self, options: RulerConfig, setting: EvaluationSetting) -> None:
        self.every = options.every or setting.every
        self.compare_with_full = options.attention == "both"
        self._options = options
        self._tasks = list(dict.fromkeys(options.tasks))
        self._trained_length = setting.trained_length
        self._texts = RulerTexts(options, setting)
        self._lengths = stage_lengths(options, setting.stage)
        if options.lengths is None:
            self._lengths = [
                length for length in self._lengths if all(self._texts.fits(task, length) for task in self._tasks)
            ]
        if not self._lengths:
            seq_len = setting.stage.seq_len
            self.missing = f"{self.key}.lengths: none is at most seq_len {seq_len} and holds every task"

    @classmethod
    def problems(cls, options: RulerConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Unknown tasks, no tokenizer or text, lengths that no stage has, and numbers of tasks that do not run."""
        yield from length_problems(options, setting, cls.key)
        yield from answer_problems(options.answer, setting, cls.key)
        for task in options.tasks:
            if task not in TASKS:
                hint = did_you_mean(task, [*TASKS])
                yield f"{cls.key}.tasks: given {task!r}{hint}; allowed: {', '.join(TASKS)}"
        natural = [task for task in options.tasks if task in TASKS and TASKS[task].natural]
        if natural and corpus_of(options, setting) is None:
            yield (
                f"{cls.key}.tasks: {', '.join(natural)} hide needles in natural text, but there is none; set "
                f"data.validation or {cls.key}.corpus, or leave these tasks out"
            )
        if options.scoring == GENERATED and setting.tp > 1:
            yield (
                f"{cls.key}.scoring: given {GENERATED!r}, which parallel.tp {setting.tp} cannot do; allowed: "
                f"{TEACHER_FORCED}"
            )
        until = setting.stage.until
        for metric in until.metrics if until else ():
            task = metric.removeprefix("ruler_")
            if task in TASKS and task != metric and task not in options.tasks:
                key = f"stages[{setting.stage.index}].until.metric"
                yield f"{key}: {metric} is not evaluated; add {task} to {cls.key}.tasks"

    @classmethod
    def pipeline_problem(cls, options: RulerConfig) -> tuple[str, str] | None:
        """Generation, and answers with full attention."""
        if options.answer == "full":
            return f"{cls.key}.answer: given 'full'", "set it to own"
        generates = options.scoring == GENERATED
        return (f"{cls.key}.scoring: given {GENERATED!r}", f"set it to {TEACHER_FORCED}") if generates else None

    @classmethod
    def data_problems(cls, options: RulerConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No given length that the stage has."""
        if not stage_lengths(options, setting.stage):
            seq_len = setting.stage.seq_len
            yield f"{cls.key}.lengths has none of at most seq_len {seq_len}; add one, or set extrapolate: true"

    @classmethod
    def check_samples(cls, options: RulerConfig, setting: EvaluationSetting) -> None:
        """Raise DataError for lengths that a task does not fit in, and for too little text around needles."""
        ruler = cls(options, setting)
        for task in ruler._tasks:
            for length in ruler._lengths:
                ruler._texts.check(task, length)

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`ruler` and `ruler_TASK` with the own attention."""
        options = self._options
        asked = {
            task: {length: self._texts.questions(task, length) for length in self._lengths} for task in self._tasks
        }
        modes = answer_modes(context, options.answer)
        scores = {name: self._scores(context, asked, name, in_full) for name, in_full in modes}
        means = {name: self._means(found[options.scoring]) for name, found in scores.items()}
        numbers = means[context.own]
        message = f"ruler {numbers['ruler']:.3f} with {context.own} attention"
        if "full" in means and context.own != "full":
            message += f", {means['full']['ruler']:.3f} with full attention on the same weights"
        message += f" ({options.scoring})"
        data = {
            "attention": context.own,
            "scoring": options.scoring,
            "trained_length": self._trained_length,
            "lengths": self._lengths,
            "tasks": self._tasks,
            "samples": options.samples,
            "seed": options.seed,
            "scores": scores,
        }
        table = [line for name, found in scores.items() for line in self._table(name, found)]
        samples = f"{options.samples} samples of each task and length, seed {options.seed}"
        table.append(f"{samples}; trained on {self._trained_length} tokens")
        return EvaluationResult(numbers, message, [*table, message], data)

    def _scores(
        self, context: EvaluationContext, asked: Mapping[str, Mapping[int, list["Prompt"]]], name: str, in_full: bool
    ) -> dict[str, dict[str, list[float]]]:
        """Scores with the model's present attention, or `in_full`: with full attention for the answers; for each
        scoring and task, a list by length."""
        found: dict[str, dict[str, list[float]]] = {TEACHER_FORCED: {task: [] for task in asked}}
        if self._options.scoring == GENERATED:
            found[GENERATED] = {task: [] for task in asked}
        tokenizer = self._texts.tokenizer
        for task, by_length in asked.items():
            for length, prompts in by_length.items():
                what = f"{task}, {name}, {format_count(length, 1024)}"
                questions = [prompt.question for prompt in prompts]
                predicted = predicted_answers(context, questions, length, what, None, in_full)
                right = [share(q.right(tokens)) for q, tokens in zip(questions, predicted, strict=True)]
                found[TEACHER_FORCED][task].append(sum(right) / len(right))
                if GENERATED not in found:
                    continue
                most = TASKS[task].tokens_to_generate
                answers = generated_answers(context, questions, most, tokenizer, f"{what}, generated", in_full)
                shares = [
                    found_share(tokenizer.decode(answer), prompt.references)
                    for answer, prompt in zip(answers, prompts, strict=True)
                ]
                found[GENERATED][task].append(sum(shares) / len(shares))
        return found

    def _means(self, scores: Mapping[str, list[float]]) -> dict[str, float]:
        """Numbers of the evaluation."""
        tasks = {f"ruler_{task}": sum(values) / len(values) for task, values in scores.items()}
        return {"ruler": sum(tasks.values()) / len(tasks), **tasks}

    def _table(self, name: str, scores: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
        """A line for each task, a column for each length."""
        for scoring, by_task in scores.items():
            columns = "".join(f"{format_count(length, 1024):>8}" for length in self._lengths)
            yield f"{f'{name}, {scoring}':<32}{columns}"
            for task, values in by_task.items():
                yield f"{task:<32}" + "".join(f"{value:>8.2f}" for value in values)


@dataclass(frozen=True)
class Prompt:
    """A question of a task, as tokens."""

    question: Question
    references: list[str]


class RulerTexts:
    """Samples of the tasks: pure functions of task, length, number of the sample, and seed.

    Raises DataError without a tokenizer, for a damaged corpus, and for lengths that a task does not fit in.
    """

    def __init__(self, options: RulerConfig, setting: EvaluationSetting) -> None:
        self.tokenizer = open_tokenizer(options, setting)
        self._options = options
        self._conversation = Conversation(setting, options.chat, Ruler.key)
        self._words = functools.lru_cache(maxsize=1)(self._draw_words)
        natural = any(TASKS[task].natural for task in options.tasks)
        self._natural = natural_text(options, setting, self.tokenizer, Ruler.key) if natural else None

    def fits(self, task: str, length: int) -> bool:
        """True if the shortest sample of a task fits in `length` tokens."""
        return self._excess(task, length, 0, TASKS[task].least) <= 0

    def check(self, task: str, length: int) -> None:
        """Raise DataError when the shortest sample of a task does not fit in `length` tokens, or the corpus has too
        little text for it."""
        excess = self._excess(task, length, 0, TASKS[task].least)
        if excess > 0:
            raise DataError(
                f"{Ruler.key}.lengths: given {length}; the shortest sample of {task} has {length + excess} tokens, its "
                "answer included; give longer ones, or leave the task out"
            )

    def questions(self, task: str, length: int) -> list[Prompt]:
        """All samples of a task, of at most `length` tokens each. Raises DataError as `check` does."""
        self.check(task, length)
        size = self._size(task, length)
        return [self._prompt(task, length, index, size) for index in range(self._options.samples)]

    def _size(self, task: str, length: int) -> int:
        """The largest size whose first sample fits in `length` tokens."""
        fits = TASKS[task].least
        most = TASKS[task].most(length, self._words(task, length, 0))
        # Doubled first, so that no text is encoded that is much longer than the sample.
        too_large = min(2 * fits, most + 1)
        while too_large <= most and self._excess(task, length, 0, too_large) <= 0:
            fits = too_large
            too_large = min(2 * fits, most + 1)
        while too_large - fits > max(1, fits // 200):
            size = (fits + too_large) // 2
            if self._excess(task, length, 0, size) > 0:
                too_large = size
            else:
                fits = size
        return fits

    def _prompt(self, task: str, length: int, index: int, size: int) -> Prompt:
        """Sample `index`, smaller than `size` if it would be too long."""
        least = TASKS[task].least
        while size > least and self._excess(task, length, index, size) > 0:
            size = max(least, size - max(1, size // 100))
        text = self._text(task, length, index, size)
        question = self._question(text)
        if len(question.tokens) > length:
            raise DataError(f"{Ruler.key}.lengths: given {length}, too short for sample {index} of {task}")
        return Prompt(question, text.references)

    def _excess(self, task: str, length: int, index: int, size: int) -> int:
        """Number of tokens of a sample beyond `length`, with room for its answer; 0 or less if it fits."""
        question = self._question(self._text(task, length, index, size))
        answer = max(TASKS[task].tokens_to_generate, len(question.tokens) - question.prompt_length)
        return question.prompt_length + answer - length

    def _text(self, task: str, length: int, index: int, size: int) -> TaskText:
        rng = random.Random(f"{task} {self._options.seed} {length} {index}")
        return TASKS[task].text(size, length, rng, self._words(task, length, index))

    def _draw_words(self, task: str, length: int, index: int) -> list[str]:
        """Natural text for a sample; empty if its task has none."""
        rng = random.Random(f"text {task} {self._options.seed} {length} {index}")
        return self._natural.words(length, rng) if TASKS[task].natural and self._natural else []

    def _question(self, text: TaskText) -> Question:
        """Tokens of a sample. The answer is encoded as it continues the end of its prompt."""
        before, after = self._conversation.around(text.example + text.before, text.after, text.prefix)
        tokens = self.tokenizer.begin(before + text.context + after)
        context = self.tokenizer.begin(before + text.context)  # its last token may hold a part of the question
        text_length = next(
            (at for at, both in enumerate(zip(context, tokens, strict=False)) if both[0] != both[1]),
            min(len(context), len(tokens)),
        )
        _, *answer = encode_segments(self.tokenizer, [text.prefix, *(part for part, _ in text.answer)])
        prompt_length = len(tokens)
        answers = []
        for part, (_, counts) in zip(answer, text.answer, strict=True):
            if counts:
                answers.append(TokenRange(len(tokens), len(tokens) + len(part)))
            tokens += part
        return Question(tokens, prompt_length, answers, [], text_length)
