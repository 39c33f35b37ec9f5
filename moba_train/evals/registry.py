"""The evaluations that a recipe may ask for: entry points of the group `moba_train.evaluations`."""

from collections.abc import Sequence
from typing import Any, cast

from moba_train import registry
from moba_train.config.base import Section
from moba_train.config.data import SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.evals.evaluation import Evaluation, EvaluationSetting
from moba_train.evals.validation_loss import ValidationLoss

EVALUATIONS = cast(registry.Registry[type[Evaluation[Any]]], registry.EVALUATIONS)
"""Evaluations by name, in the order in which they run."""

Asked = dict[type[Evaluation[Any]], Section | None]
"""Evaluations with their options, in the order in which they run. The validation loss has no options."""


def asked_evaluations(section: EvaluationConfig, validation: Sequence[SourceConfig]) -> Asked:
    """Evaluations that a recipe with this `evaluation` section and these sources of held-out text asks for.

    Held-out text asks for its loss; any other evaluation is asked for by its section. Others are not imported.
    """
    asked: Asked = {}
    for name in EVALUATIONS:
        options = section.options_of(name)
        if options is not None or (name == ValidationLoss.name and validation):
            asked[EVALUATIONS[name]] = options
    return asked


def stage_evaluations(section: EvaluationConfig, setting: EvaluationSetting) -> list[Evaluation[Any]]:
    """Evaluations that run in the stage of `setting`, with their data. Raises DataError for damaged corpora."""
    if not setting.stage.evaluate:
        return []
    asked = asked_evaluations(section, setting.validation)
    return [evaluation(options, setting) for evaluation, options in asked.items()]


def evaluation_of(number: str) -> type[Evaluation[Any]] | None:
    """The evaluation that gives the number of this name; None if none does. Imports all evaluations."""
    names = (
        (evaluation, evaluation.numbers | evaluation.numbers_against_full)
        for evaluation in EVALUATIONS.usable().values()
    )
    return next((evaluation for evaluation, given in names if number in given), None)
