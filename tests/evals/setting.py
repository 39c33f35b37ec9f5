"""An evaluation as a recipe's first stage has it."""

from typing import Any, TypeVar

from moba_train.config.schema import RunConfig
from moba_train.evals.evaluation import Evaluation, EvaluationSetting
from moba_train.evals.registry import asked_evaluations
from moba_train.resolve.evaluations import evaluation_settings
from moba_train.resolve.run import resolve_unchecked


def stage_setting(config: RunConfig) -> EvaluationSetting:
    """Setting of evaluations in the recipe's first stage."""
    return evaluation_settings(resolve_unchecked(config))[0]


AnyEvaluation = TypeVar("AnyEvaluation", bound=Evaluation[Any])


def built(evaluation: type[AnyEvaluation], config: RunConfig) -> AnyEvaluation:
    """The evaluation of the recipe's first stage, which asks for it."""
    asked = asked_evaluations(config.evaluation, config.data.validation)
    return evaluation(asked[evaluation], stage_setting(config))
