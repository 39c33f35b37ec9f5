"""Evaluations by tasks with right answers: scores by task and length, of one forward pass or of generated answers."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, TypeVar

from moba_train.config.base import format_count
from moba_train.config.explain import did_you_mean
from moba_train.evals.evaluation import EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.tools.needle.answers import QuestionsByLength, generated_answers, predicted_answers, share
from moba_train.tools.needle.full_answers import answer_modes, answer_problems
from moba_train.tools.needle.haystack import length_problems
from moba_train.tools.tasks.sized import Prompt, SizedTask, SizedTexts, TasksConfig

TEACHER_FORCED, GENERATED = "teacher_forced", "generated"
SHOWN = 200
"""Characters of a generated answer that results show."""


AnyTasks = TypeVar("AnyTasks", bound=TasksConfig)


class TaskScores(QuestionsByLength[AnyTasks]):
    """Mean score over the lengths, of each task (`NAME_TASK`) and of all tasks (`NAME`)."""

    made: ClassVar[Mapping[str, SizedTask]]
    """Tasks that are made here, by name."""
    further_tasks = ""
    """Words about tasks that have no name."""

    def __init__(self, options: AnyTasks, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self._tasks = list(dict.fromkeys(options.tasks))
        self._trained_length = setting.trained_length
        self._texts = self.texts(options, setting)
        self.choose_lengths(
            setting, lambda length: all(self._texts.excess(task, length) <= 0 for task in self._tasks), self._check
        )

    def _check(self, length: int) -> None:
        for task in self._tasks:
            self._texts.check(task, length)

    @classmethod
    def texts(cls, options: AnyTasks, setting: EvaluationSetting) -> SizedTexts:
        """Samples of the tasks. Raises DataError for what cannot be read."""
        return SizedTexts(options, setting, cls.key, cls.made)

    @classmethod
    def label(cls, task: str) -> str:
        """Name of a task in numbers and tables."""
        return task

    @classmethod
    def problems(cls, options: AnyTasks, setting: EvaluationSetting) -> Iterator[str]:
        """Unknown tasks, no tokenizer, lengths that no stage has, and numbers of tasks that do not run."""
        yield from length_problems(options, setting, cls.key)
        yield from answer_problems(options.answer, setting, cls.key)
        known = [*cls.made]
        for task in options.tasks:
            if cls.label(task) == task and task not in known:
                hint = did_you_mean(task, known)
                yield f"{cls.key}.tasks: given {task!r}{hint}; allowed: {', '.join(known)}{cls.further_tasks}"
        if options.scoring == GENERATED and setting.tp > 1:
            yield (
                f"{cls.key}.scoring: given {GENERATED!r}, which parallel.tp {setting.tp} cannot do; allowed: "
                f"{TEACHER_FORCED}"
            )
        until = setting.stage.until
        for metric in until.metrics if until else ():
            task = metric.removeprefix(f"{cls.name}_")
            if task in known and task != metric and task not in options.tasks:
                key = f"stages[{setting.stage.index}].until.metric"
                yield f"{key}: {metric} is not evaluated; add {task} to {cls.key}.tasks"

    @classmethod
    def pipeline_problem(cls, options: AnyTasks) -> tuple[str, str] | None:
        """Generation, and answers with full attention."""
        if options.answer == "full":
            return f"{cls.key}.answer: given 'full'", "set it to own"
        generates = options.scoring == GENERATED
        return (f"{cls.key}.scoring: given {GENERATED!r}", f"set it to {TEACHER_FORCED}") if generates else None

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`NAME` and `NAME_TASK` with the own attention."""
        options = self._options
        asked = {
            self.label(task): {length: self._texts.questions(task, length) for length in self.lengths}
            for task in self._tasks
        }
        first_answers: dict[str, dict[str, list[str]]] = {}
        scores: dict[str, dict[str, dict[str, list[float]]]] = {}
        for name, in_full in answer_modes(context, options.answer):
            scores[name] = {TEACHER_FORCED: self._teacher_forced(context, asked, name, in_full)}
            if options.scoring == GENERATED:
                scores[name][GENERATED], first_answers[name] = self._generated(context, asked, name, in_full)
        means = {name: self._means(found[options.scoring]) for name, found in scores.items()}
        numbers = means[context.own]
        message = f"{self.name} {numbers[self.name]:.3f} with {context.own} attention"
        if "full" in means and context.own != "full":
            message += f", {means['full'][self.name]:.3f} with full attention on the same weights"
        message += f" ({options.scoring})"
        data = {
            "attention": context.own,
            "scoring": options.scoring,
            "trained_length": self._trained_length,
            "lengths": self.lengths,
            "tasks": [*asked],
            "samples": options.samples,
            "scores": scores,
        } | ({"first_answers": first_answers} if first_answers else {})
        table = [line for name, found in scores.items() for line in self._table(name, found)]
        counts = sorted({len(prompts) for by_length in asked.values() for prompts in by_length.values()})
        samples = f"{' to '.join(map(str, counts[:1] + counts[1:][-1:]))} samples of each task and length"
        table.append(f"{samples}; trained on {self._trained_length} tokens")
        return EvaluationResult(numbers, message, [*table, message], data)

    def _teacher_forced(
        self, context: EvaluationContext, asked: Mapping[str, Mapping[int, list[Prompt]]], name: str, in_full: bool
    ) -> dict[str, list[float]]:
        """Share of the references whose every token is the most likely one given the right ones before it, with the
        model's present attention, or `in_full`: with full attention for the answers; for each task, a list by length.
        """
        found: dict[str, list[float]] = {task: [] for task in asked}
        for task, by_length in asked.items():
            for length, prompts in by_length.items():
                questions = [prompt.question for prompt in prompts]
                predicted = predicted_answers(context, questions, length, _loop(task, name, length), None, in_full)
                right = [share(q.right(tokens)) for q, tokens in zip(questions, predicted, strict=True)]
                found[task].append(sum(right) / len(right))
        return found

    def _generated(
        self, context: EvaluationContext, asked: Mapping[str, Mapping[int, list[Prompt]]], name: str, in_full: bool
    ) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
        """Scores of generated answers, as `_teacher_forced`, and the beginning of the first answer of each length."""
        found: dict[str, list[float]] = {task: [] for task in asked}
        shown: dict[str, list[str]] = {task: [] for task in asked}
        tokenizer = self._texts.tokenizer
        for task, by_length in asked.items():
            for length, prompts in by_length.items():
                most = max(prompt.most_tokens for prompt in prompts)
                questions = [prompt.question for prompt in prompts]
                loop = f"{_loop(task, name, length)}, generated"
                answers = generated_answers(context, questions, most, tokenizer, loop, in_full, tokenizer.ends)
                texts = [
                    tokenizer.decode(answer[: prompt.most_tokens])
                    for answer, prompt in zip(answers, prompts, strict=True)
                ]
                scores = [prompt.score(text, prompt.references) for text, prompt in zip(texts, prompts, strict=True)]
                found[task].append(sum(scores) / len(scores))
                shown[task].append(texts[0][:SHOWN])
        return found, shown

    def _means(self, scores: Mapping[str, list[float]]) -> dict[str, float]:
        """Numbers of the evaluation."""
        tasks = {f"{self.name}_{task}": sum(values) / len(values) for task, values in scores.items()}
        return {self.name: sum(tasks.values()) / len(tasks), **tasks}

    def _table(self, name: str, scores: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
        """A line for each task, a column for each length."""
        for scoring, by_task in scores.items():
            columns = "".join(f"{format_count(length, 1024):>8}" for length in self.lengths)
            yield f"{f'{name}, {scoring}':<32}{columns}"
            for task, values in by_task.items():
                yield f"{task:<32}" + "".join(f"{value:>8.2f}" for value in values)


def _loop(task: str, name: str, length: int) -> str:
    """A loop's name for people."""
    return f"{task}, {name}, {format_count(length, 1024)}"
