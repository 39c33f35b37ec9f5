"""Evaluations of a run while it trains: when they run, what stops them, and the exit criterion that they decide."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moba_train.checkpoint.retention import Numbers
from moba_train.config.data import SourceConfig
from moba_train.config.evaluation import EvaluationConfig
from moba_train.config.schema import UntilConfig
from moba_train.config.stages import Stage
from moba_train.errors import CheckpointError
from moba_train.evals.evaluation import (
    Evaluation,
    EvaluationContext,
    EvaluationSetting,
    EvaluationStoppedError,
    name_of,
    with_full,
)
from moba_train.evals.registry import EVALUATIONS, asked_evaluations, stage_evaluations
from moba_train.health.watch import Watch
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.world import World, any_rank, broadcast
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.progress import Progress
from moba_train.run.stop import RunStop
from moba_train.telemetry.jsonl import read_since
from moba_train.telemetry.telemetry import Telemetry


class Verdict(NamedTuple):
    """Verdict on a criterion, and the comparison in words."""

    met: bool
    message: str


class StageExit:
    """Judges the exit criterion of one stage; for a stage without `until` there is nothing to judge."""

    def __init__(self, stage: Stage, trailing_loss_before: float | None) -> None:
        """`trailing_loss_before`: at the end of the stage before, None where it was not evaluated.

        Raises CheckpointError when the criterion refers to it and it is None.
        """
        self._stage = stage
        self._trailing_loss_before = trailing_loss_before
        recovered = stage.until.trailing_loss_recovered if stage.until else None
        if recovered is not None and recovered.reference == "before" and trailing_loss_before is None:
            raise CheckpointError(
                f"stages[{stage.index}].until.trailing_loss_recovered.reference: given 'before', but the stage before "
                "was trained without evaluation.position_wise; set reference: full"
            )

    def judge(self, step: int, numbers: Mapping[str, float]) -> Verdict | None:
        """The verdict on the `numbers` that were evaluated after `step`, by name.

        None where there is nothing to judge: without a criterion, before the stage's `tokens` are consumed, or when a
        number of the criterion was not evaluated at this step.
        """
        until = self._stage.until
        if until is None or step < self._stage.planned_end_step or not set(until.metrics) <= numbers.keys():
            return None
        verdict = judge(until, numbers, self._trailing_loss_before)
        if not verdict.met and step == self._stage.end_step:
            return Verdict(False, f"{verdict.message}; the stage ends all the same, at its max_tokens")
        return verdict


def judge(until: UntilConfig, numbers: Mapping[str, float], trailing_loss_before: float | None) -> Verdict:
    """Compare the numbers that `until.metrics` names with their bound. A number that is NaN never meets it."""
    if until.trailing_loss_recovered is not None:
        tolerance = until.trailing_loss_recovered.tolerance
        if until.trailing_loss_recovered.reference == "full":
            reference = numbers["trailing_loss_full"]
            words = "with full attention on the same weights"
        else:
            assert trailing_loss_before is not None
            reference = trailing_loss_before
            words = "at the end of the stage before"
        trailing = numbers["trailing_loss"]
        met = trailing <= reference + tolerance
        comparison = f"trailing loss {trailing:.4f}, {reference:.4f} {words}, tolerance {tolerance:g}"
    else:
        assert until.metric is not None
        value = numbers[until.metric]
        if until.at_most is not None:
            met, bound = value <= until.at_most, f"at most {until.at_most:g}"
        else:
            assert until.at_least is not None
            met, bound = value >= until.at_least, f"at least {until.at_least:g}"
        comparison = f"{until.metric} {value:.4f}, wanted: {bound}"
    return Verdict(met, f"criterion {'met' if met else 'not met'}: {comparison}")


class StageEvaluations:
    """Runs the evaluations of one stage when they are due, and reports them to `telemetry` as events.

    Constructed and called on all ranks together.
    """

    def __init__(
        self,
        section: EvaluationConfig,
        setting: EvaluationSetting,
        context: EvaluationContext,
        telemetry: Telemetry,
    ) -> None:
        """`context`: without attentions, each evaluation gets its own. Raises DataError for damaged corpora."""
        self._stage = setting.stage
        self._telemetry = telemetry
        self._evaluations: list[tuple[Evaluation[Any], EvaluationContext]] = []
        layers = self._stage.attention
        needed = set(self._stage.until.metrics) if self._stage.until else set()
        for evaluation in stage_evaluations(section, setting):
            with_both = evaluation.compare_with_full or not needed.isdisjoint(evaluation.numbers_against_full)
            attentions = with_full(layers) if with_both else {name_of(layers): layers}
            self._evaluations.append((evaluation, dataclasses.replace(context, attentions=attentions)))
        self._step = -1
        self._numbers: dict[str, float] = {}

    def due(self, step: int) -> bool:
        """True if `run_due` has anything to do after `step`."""
        return any(evaluation.due(step, self._stage) for evaluation, _ in self._evaluations)

    def run_at_start(self, tokens: int, metrics: Path) -> None:
        """Run all before the stage's first step, except those whose results are in the file `metrics` already: the run
        was stopped or killed there, and resumed."""
        step = self._stage.first_step
        place = (step, self._stage.name)
        records = read_since(metrics, step)
        # Rank 0 alone has the file; all ranks must skip the same evaluations, which are collectives.
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

    def _run(self, step: int, tokens: int, wanted: Callable[[Evaluation[Any]], bool]) -> dict[str, float]:
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


STAGE_EXIT = "stage_exit"


def evaluation_records() -> frozenset[str]:
    """Types of the records that the evaluations after a step leave."""
    return frozenset({STAGE_EXIT, *EVALUATIONS})


class RunEvaluations:
    """Runs the evaluations of the current stage and records in `progress` what they lead to.

    Called on all ranks together. An evaluation ends between two batches, with EvaluationStoppedError, where any rank is
    asked to stop.
    """

    _stage: Stage
    _evaluations: StageEvaluations
    _exit: StageExit

    def __init__(
        self,
        section: EvaluationConfig,
        metrics: Path,
        world: World,
        *,
        progress: Progress,
        checkpoints: RunCheckpoints,
        telemetry: Telemetry,
        watch: Watch,
        stop: RunStop,
        is_recorded: Callable[..., bool],
        known_numbers: Numbers | None = None,
    ) -> None:
        """Evaluations of a run.

        section: `evaluation` of the recipe
        metrics: file of the run's records
        is_recorded: `is_recorded(type, stage, **fields)` is True if an earlier start recorded such an event at the step
            from which the run resumed
        known_numbers: those of the evaluations that are due at the checkpoint from which the run resumes; None if they
            must be run
        """
        self._section = section
        self._metrics = metrics
        self._world = world
        self._progress = progress
        self._checkpoints = checkpoints
        self._telemetry = telemetry
        self._watch = watch
        self._stop = stop
        self._is_recorded = is_recorded
        self._known_numbers = known_numbers

    def begin_stage(self, setting: EvaluationSetting, model: Transformer, data_shard: DataShard) -> None:
        """Prepare the evaluations and the exit criterion of the stage of `setting`, which begins or goes on.

        Raises DataError for damaged corpora, and CheckpointError when the criterion refers to a number that the stage
        before has not evaluated.
        """
        stage = setting.stage
        self._stage = stage
        self._exit = StageExit(stage, self._progress.trailing_loss_before)
        context = EvaluationContext(model, stage, data_shard, self._world.device, between_batches=self._between_batches)
        self._evaluations = StageEvaluations(self._section, setting, context, self._telemetry)

    def due(self, step: int) -> bool:
        """True if any evaluation is due after `step`."""
        return self._evaluations.due(step)

    @property
    def are_complete(self) -> bool:
        """True if no evaluation need run after the current step."""
        return not self._progress.evaluation_due or self._known_numbers is not None

    def numbers_at(self, step: int) -> dict[str, float]:
        """The numbers found after `step`; empty unless it is the last step that was evaluated."""
        return self._evaluations.numbers_at(step)

    def run_at_start(self, tokens: int) -> None:
        """Run all evaluations before the stage's first step, at which `tokens` are consumed."""
        self._batch_began = time.perf_counter()
        with self._watch.phase("evaluation", self._progress.step):
            self._evaluations.run_at_start(tokens, self._metrics)

    def run_due(self, tokens: int) -> bool:
        """Run the evaluations that are due after the current step. Returns True if they end the stage.

        The checkpoint of the step was saved before, and says that they are due. So a run that resumes from it runs them
        first, unless it finds the numbers that the run before found there: `Evaluated`.
        """
        progress = self._progress
        if not progress.evaluation_due:
            return False
        numbers = self._known_numbers
        self._known_numbers = None
        if numbers is None:
            numbers = self._evaluate(tokens)
        exits = self._judge_exit(numbers, tokens)
        progress.end_evaluation(self._stage if exits else None)
        self._checkpoints.evaluated(progress.step, numbers)
        return exits

    def _evaluate(self, tokens: int) -> dict[str, float]:
        """Run what is due after the current step, and where that ends the stage also all other evaluations. Returns the
        numbers found, by name."""
        step = self._progress.step
        self._batch_began = time.perf_counter()
        with self._watch.phase("evaluation", step):
            numbers = self._evaluations.run_due(step, tokens)
            verdict = self._exit.judge(step, numbers)
            if verdict is not None and verdict.met:
                # At the end of a stage all evaluations are due; only now is it known that this step is the last.
                numbers |= self._evaluations.run_others(step, tokens)
        return numbers

    def _judge_exit(self, numbers: dict[str, float], tokens: int) -> bool:
        """True if the stage ends here because the evaluations' numbers meet its exit criterion. Reports it, unless an
        earlier start has done so here, with the same criterion."""
        progress = self._progress
        progress.evaluated(numbers.get("trailing_loss"))
        verdict = self._exit.judge(progress.step, numbers)
        if verdict is None:
            return False
        if not self._is_recorded(STAGE_EXIT, self._stage, step=progress.step, message=verdict.message):
            self._telemetry.event(progress.step, tokens, STAGE_EXIT, verdict.message)
        return verdict.met

    def _between_batches(self) -> None:
        """End the evaluation where any rank is asked to stop; called on all ranks together, before each batch."""
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # else all batches are in the GPU's queue before a signal comes
        now = time.perf_counter()
        self._stop.time.batch_took(now - self._batch_began)
        self._batch_began = now
        if any_rank(self._stop.request.requested or self._checkpoints.wants_to_stop):
            raise EvaluationStoppedError


def known_numbers(
    section: EvaluationConfig,
    validation: Sequence[SourceConfig],
    stage: Stage,
    progress: Progress,
    numbers: Numbers | None,
) -> Numbers | None:
    """Numbers of the evaluations that are due after the current step, the checkpoint from which the run resumes; None
    if they must be run.

    numbers: those that the run before found there. If `stage` ends here now, and did not by the recipe of the
    checkpoint, further evaluations are due, which is recorded in `progress`.
    """
    if not progress.ends_here_now(stage):
        return numbers
    progress.expect_evaluation()
    asked = asked_evaluations(section, validation) if stage.evaluate else ()
    complete = all(evaluation.numbers <= (numbers or {}).keys() for evaluation in asked)
    return numbers if complete else None
