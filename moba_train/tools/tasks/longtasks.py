"""Long tasks by generation: three of our own, and those of local files in the manner of HELMET and LongBench."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from moba_train.evals.evaluation import EvaluationSetting
from moba_train.tools.tasks.files import TaskLine, read_tasks
from moba_train.tools.tasks.made import MADE
from moba_train.tools.tasks.scored import GENERATED, TaskScores
from moba_train.tools.tasks.sized import Prompt, SizedTexts, TasksConfig

SUFFIX = ".jsonl"


class LongTasksConfig(TasksConfig):
    """Tasks of our own and from local files, as HELMET and LongBench have them. See docs/how-to/evaluate.md."""

    not_here = {**TasksConfig.not_here, "demonstrations": "gone: a file's lines have as many as they should have"}

    tasks: list[str] = Field(
        [*MADE],
        min_length=1,
        description=f"tasks of our own by name, and files of samples, whose names end in {SUFFIX}",
    )
    scoring: Literal["teacher_forced", "generated"] = Field(
        "generated",
        description="answers that the numbers are about; generated: the tasks' metrics, by greedy generation, which "
        "needs parallel.tp and pp 1; teacher_forced: the most likely tokens given the right ones before them, in one "
        "forward pass",
    )
    truncate: Literal["end", "middle"] = Field(
        "middle",
        description="part of a file's context that is left out if a sample is too long: its middle, as in "
        "LongBench, or its end, as in HELMET; question and demonstrations stay",
    )

    def named_files(self) -> list[str]:
        """Files of samples."""
        return [task for task in self.tasks if task.endswith(SUFFIX)]


class LongTasks(TaskScores[LongTasksConfig]):
    """Mean score over the lengths, of each task and of all tasks."""

    name = "longtasks"
    Options = LongTasksConfig
    data_name = "longtasks_scores"
    made = MADE
    further_tasks = f", and files whose names end in {SUFFIX}"
    numbers = frozenset({"longtasks", *(f"longtasks_{task}" for task in MADE)})

    @classmethod
    def texts(cls, options: LongTasksConfig, setting: EvaluationSetting) -> "LongTaskTexts":
        """Samples of the tasks."""
        return LongTaskTexts(options, setting, cls.key)

    @classmethod
    def label(cls, task: str) -> str:
        """A file's name without its end."""
        return Path(task).stem if task.endswith(SUFFIX) else task

    @classmethod
    def problems(cls, options: LongTasksConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Those of all tasks, and two tasks of one name."""
        yield from super().problems(options, setting)
        for name, count in Counter(map(cls.label, dict.fromkeys(options.tasks))).items():
            if count > 1:
                yield f"{cls.key}.tasks: {count} tasks are called {name}; rename a file"


class LongTaskTexts(SizedTexts):
    """Samples of our own tasks, as large as their length allows, and of files, of which what is too long is left out.

    Raises DataError as `SizedTexts`, and for files that cannot be read.
    """

    def __init__(self, options: LongTasksConfig, setting: EvaluationSetting, key: str) -> None:
        super().__init__(options, setting, key, MADE)
        self._long = options
        self._files = {path: read_tasks(path, f"{key}.tasks", options.samples) for path in options.named_files()}

    def excess(self, task: str, length: int) -> int:
        """Tokens of a file's longest sample, with a single token of its context, beyond `length`."""
        if task not in self._files:
            return super().excess(task, length)
        return max(self._made_of(line, "")[1] for line in self._files[task]) + 1 - length

    def questions(self, task: str, length: int) -> list[Prompt]:
        """All samples of a task, of at most `length` tokens each. Raises DataError as `check` does."""
        if task not in self._files:
            return super().questions(task, length)
        self.check(task, length)
        return [self._shortened(line, length) for line in self._files[task]]

    def _made_of(self, line: TaskLine, context: str) -> tuple[Prompt, int]:
        """The prompt with this context, and its tokens with room for an answer."""
        text = line.text(context)
        question = self.encode(text)
        answer = len(question.tokens) - question.prompt_length
        if self._options.scoring == GENERATED:
            answer = max(answer, line.max_new_tokens)
        prompt = Prompt(question, line.answers, line.max_new_tokens, line.score)
        return prompt, question.prompt_length + answer

    def _shortened(self, line: TaskLine, length: int) -> Prompt:
        """The prompt with as much of its context as fits in `length` tokens."""
        context = self.tokenizer.encode(line.context)
        kept = len(context)
        prompt, size = self._made_of(line, line.context)
        # More than once: two parts that are joined may have other tokens.
        while size > length:
            kept = max(kept - (size - length), 0)
            last = kept // 2 if self._long.truncate == "middle" else 0
            parts = (context[: kept - last], context[len(context) - last :])
            prompt, size = self._made_of(line, "".join(map(self.tokenizer.decode, parts)))
        return prompt
