"""The evaluations that run while a stage trains."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from moba_train.config.schema import RunConfig
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationStoppedError
from moba_train.evals.registry import stage_evaluations
from moba_train.evals.variants import name_of, with_full
from moba_train.parallel.world import broadcast
from moba_train.telemetry.jsonl import read_since
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

    def due(self, step: int) -> bool:
        """Whether `run_due` has anything to do after `step`."""
        return any(evaluation.due(step, self._stage) for evaluation, _ in self._evaluations)

    def run_at_start(self, tokens: int, metrics: Path) -> None:
        """Run all before the stage's first step, except those whose results are in the file `metrics` already: the run
        was stopped or killed there, and resumed."""
        step = self._stage.first_step
        place = (step, self._stage.name)
        records = read_since(metrics, step)
        here = broadcast({record["type"] for record in records if (record["step"], record.get("stage")) == place})
        self._run(step, tokens, lambda evaluation: evaluation.name not in here)

    def run_due(self, step: int, tokens: int) -> dict[str, float]:
        """Run what is due after `step`, at which `tokens` are consumed. Returns the numbers found, by name.

        An evaluation during which `EvaluationContext.between_batches` raises is not reported, and those after it are
        not run; the model then has the stage's own attention.
        """
        return self._run(step, tokens, lambda evaluation: evaluation.due(step, self._stage))

    def run_others(self, step: int, tokens: int) -> dict[str, float]:
        """`run_due` of those that were not due after `step`: the stage has turned out to end there."""
        return self._run(step, tokens, lambda evaluation: not evaluation.due(step, self._stage))

    def _run(self, step: int, tokens: int, wanted: Callable[[Evaluation], bool]) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for evaluation, context in self._evaluations:
            if evaluation.missing:
                if wanted(evaluation) and step in (self._stage.planned_end_step, self._stage.end_step):
                    text = f"{evaluation.missing}: no {evaluation.name} in this stage"
                    self._telemetry.event(step, tokens, "warning", text)
            elif wanted(evaluation):
                try:
                    result = evaluation.run(context)
                except EvaluationStoppedError:
                    context.restore_attention()
                    raise
                fields = {**result.numbers, evaluation.data_name or evaluation.name: result.data}
                self._telemetry.event(step, tokens, evaluation.name, result.message, **fields)
                numbers |= result.numbers
        self._numbers = (self._numbers if step == self._step else {}) | numbers
        self._step = step
        return numbers

    def numbers_at(self, step: int) -> dict[str, float]:
        """The numbers found after `step`; empty unless it is the last step that was asked for."""
        return self._numbers if step == self._step else {}
