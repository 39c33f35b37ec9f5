"""RULER's tasks on a model: share of the answers that it finds, by task and length of the context."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from moba_train.evals.evaluation import EvaluationSetting
from moba_train.tools.ruler.ruler_tasks import TASKS
from moba_train.tools.tasks.scored import TaskScores
from moba_train.tools.tasks.sized import TasksConfig


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
