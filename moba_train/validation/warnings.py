"""What a recipe can do but its author has hardly meant, in words; refused is only what cannot work."""

from collections.abc import Iterator

from moba_train.config.run import EvaluationConfig
from moba_train.config.schema import RunConfig
from moba_train.evals.registry import enabled_evaluations


def recipe_warnings(config: RunConfig) -> list[str]:
    """Sentences about a validated recipe, each with the keys to change: `moba-train plan` and a run that starts print
    them."""
    return [*_evaluation_warnings(config)]


def _evaluation_warnings(config: RunConfig) -> Iterator[str]:
    """Evaluations that are configured but never run in training. No error: `moba-train eval` runs them afterwards."""
    asked = ", ".join(evaluation.key for evaluation in enabled_evaluations(config))
    if asked and not any(stage.evaluate for stage in config.stages):
        yield (
            f"{asked}: given, but no stage evaluates, as stages[i].evaluate is false in all of them: the run has no "
            "evaluation; set it to true in a stage, or use `moba-train eval` afterwards"
        )
    if not asked and config.evaluation != EvaluationConfig():
        yield "evaluation: given, but there is nothing to evaluate on; set data.validation, or remove the section"
