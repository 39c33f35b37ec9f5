"""The evaluations there are. A new one is its own file and one line here."""

from collections.abc import Sequence

from moba_train.config.explain import did_you_mean
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.errors import UserError
from moba_train.evals.evaluation import Evaluation
from moba_train.evals.gate_probe import GateProbe
from moba_train.evals.gradient_reach import GradientReach
from moba_train.evals.needle import Needle
from moba_train.evals.needle_signal import NeedleSignalEvaluation
from moba_train.evals.position_wise import PositionWise
from moba_train.evals.ruler import Ruler
from moba_train.evals.validation_loss import ValidationLoss

EVALUATIONS: tuple[type[Evaluation], ...] = (
    ValidationLoss,
    PositionWise,
    GateProbe,
    GradientReach,
    Needle,
    NeedleSignalEvaluation,
    Ruler,
)


def enabled_evaluations(config: RunConfig) -> list[type[Evaluation]]:
    """The evaluations that the recipe asks for, in the order in which they run."""
    return [evaluation for evaluation in EVALUATIONS if evaluation.enabled(config)]


def stage_evaluations(config: RunConfig, stage: Stage) -> list[Evaluation]:
    """The evaluations that the recipe asks for in `stage`, with their data. Raises DataError for damaged corpora."""
    return [evaluation(config, stage) for evaluation in enabled_evaluations(config)] if stage.evaluate else []


def evaluations_named(names: Sequence[str]) -> list[type[Evaluation]]:
    """The evaluations of these names, each once, in the order given. Raises UserError for a name that none has."""
    known = {evaluation.name: evaluation for evaluation in EVALUATIONS}
    for name in names:
        if name not in known:
            allowed = ", ".join(known)
            raise UserError(
                f"--tasks: there is no evaluation {name!r}{did_you_mean(name, [*known])}; allowed: {allowed}"
            )
    return [known[name] for name in dict.fromkeys(names)]


def evaluation_of(number: str) -> type[Evaluation] | None:
    """The evaluation that gives the number of this name; None: none does."""
    names = ((evaluation, evaluation.numbers | evaluation.numbers_against_full) for evaluation in EVALUATIONS)
    return next((evaluation for evaluation, given in names if number in given), None)
