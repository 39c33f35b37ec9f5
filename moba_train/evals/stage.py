"""The evaluations that run while a stage trains."""

import dataclasses

from moba_train.config.schema import RunConfig
from moba_train.evals.evaluation import Evaluation, EvaluationContext
from moba_train.evals.registry import stage_evaluations
from moba_train.evals.variants import name_of, with_full
from moba_train.telemetry.telemetry import Telemetry


class StageEvaluations:
    """Runs the evaluations of one stage when they are due, and reports them to `telemetry` as events.

    Constructed and called on all ranks together.
    """

    def __init__(self, config: RunConfig, context: EvaluationContext, telemetry: Telemetry) -> None:
        """`context`: without attentions, each evaluation gets its own. Raises DataError for damaged corpora."""
        self._stage = context.stage
        self._telemetry = telemetry
        self._evaluations: list[tuple[Evaluation, EvaluationContext]] = []
        layers = self._stage.attention
        needed = set(self._stage.until.metrics) if self._stage.until else set()
        for evaluation in stage_evaluations(config, self._stage):
            with_both = evaluation.compare_with_full or not needed.isdisjoint(evaluation.numbers_against_full)
            attentions = with_full(layers) if with_both else {name_of(layers): layers}
            self._evaluations.append((evaluation, dataclasses.replace(context, attentions=attentions)))
        self._step = -1
        self._numbers: dict[str, float] = {}

    def run_due(self, step: int, tokens: int) -> dict[str, float]:
        """Run what is due after `step`, at which `tokens` are consumed. Returns the numbers found, by name."""
        self._step = step
        self._numbers = {}
        for evaluation, context in self._evaluations:
            if evaluation.missing:
                if step in (self._stage.planned_end_step, self._stage.end_step):
                    text = f"{evaluation.missing}: no {evaluation.name} in this stage"
                    self._telemetry.event(step, tokens, "warning", text)
            elif evaluation.due(step, self._stage):
                result = evaluation.run(context)
                fields = {**result.numbers, evaluation.data_name or evaluation.name: result.data}
                self._telemetry.event(step, tokens, evaluation.name, result.message, **fields)
                self._numbers |= result.numbers
        return self._numbers

    def numbers_at(self, step: int) -> dict[str, float]:
        """The numbers found after `step`; empty unless it is the last step that was asked for."""
        return self._numbers if step == self._step else {}
