"""The evaluations that a recipe may ask for: entry points of the group `moba_train.evaluations`."""

from collections.abc import Sequence
from typing import cast

from moba_train import registry
from moba_train.config.explain import did_you_mean
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import UserError
from moba_train.evals.evaluation import Evaluation
from moba_train.evals.validation_loss import ValidationLoss

EVALUATIONS = cast(registry.Registry[type[Evaluation]], registry.EVALUATIONS)
"""By name, in the order in which they run."""


def enabled_evaluations(config: RunConfig) -> list[type[Evaluation]]:
    """The evaluations that the recipe asks for, in the order in which they run."""
    # Held-out text asks for its loss; any other evaluation is asked for by its section. Others are not imported.
    asked = (name for name in EVALUATIONS if name == ValidationLoss.name or config.evaluation.options_of(name))
    return [EVALUATIONS[name] for name in asked if EVALUATIONS[name].enabled(config)]


def stage_evaluations(config: RunConfig, stage: Stage) -> list[Evaluation]:
    """The evaluations that the recipe asks for in `stage`, with their data. Raises DataError for damaged corpora."""
    return [evaluation(config, stage) for evaluation in enabled_evaluations(config)] if stage.evaluate else []


def evaluations_named(names: Sequence[str]) -> list[type[Evaluation]]:
    """The evaluations of these names, each once, in the order given. Raises UserError for a name that none has."""
    for name in names:
        if name not in EVALUATIONS:
            hint = did_you_mean(name, [*EVALUATIONS])
            raise UserError(f"--tasks: there is no evaluation {name!r}{hint}; allowed: {', '.join(EVALUATIONS)}")
    return [EVALUATIONS[name] for name in dict.fromkeys(names)]


def evaluation_of(number: str) -> type[Evaluation] | None:
    """The evaluation that gives the number of this name; None: none does."""
    names = ((evaluation, evaluation.numbers | evaluation.numbers_against_full) for evaluation in EVALUATIONS.values())
    return next((evaluation for evaluation, given in names if number in given), None)
