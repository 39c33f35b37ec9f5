"""The evaluations of a run as its trainer sees them: when they run, what stops them, whether they end the stage."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from moba_train.checkpoint.retention import Numbers
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.evals.evaluation import EvaluationContext, EvaluationStoppedError
from moba_train.evals.registry import EVALUATIONS, enabled_evaluations
from moba_train.evals.stage import StageEvaluations
from moba_train.health.watch import Watch
from moba_train.model.transformer import Transformer
from moba_train.parallel.stage import DataShard
from moba_train.parallel.world import World, any_rank
from moba_train.telemetry.telemetry import Telemetry
from moba_train.training.checkpoints import RunCheckpoints
from moba_train.training.progress import Progress
from moba_train.training.stage_exit import StageExit
from moba_train.training.stop import StopRequest
from moba_train.training.stop_time import StopTime

STAGE_EXIT = "stage_exit"

EVALUATION_RECORDS = frozenset({STAGE_EXIT, *(evaluation.name for evaluation in EVALUATIONS)})
"""Types of the records that the evaluations after a step leave."""


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
        config: RunConfig,
        world: World,
        *,
        progress: Progress,
        checkpoints: RunCheckpoints,
        telemetry: Telemetry,
        watch: Watch,
        stop: StopRequest,
        stop_time: StopTime,
        is_recorded: Callable[..., bool],
    ) -> None:
        """`is_recorded(type, stage, **fields)`: whether an earlier start recorded such an event at the step from which
        the run resumed."""
        self._config = config
        self._world = world
        self._progress = progress
        self._checkpoints = checkpoints
        self._telemetry = telemetry
        self._watch = watch
        self._stop = stop
        self._stop_time = stop_time
        self._is_recorded = is_recorded

    def begin_stage(self, stage: Stage, model: Transformer, data_shard: DataShard) -> None:
        """Prepare the evaluations and the exit criterion of a stage that begins or goes on.

        Raises DataError for damaged corpora, and CheckpointError when the criterion refers to a number that the stage
        before has not evaluated.
        """
        self._stage = stage
        self._exit = StageExit(stage, self._progress.trailing_loss_before)
        context = EvaluationContext(model, stage, data_shard, self._world.device, between_batches=self._between_batches)
        self._evaluations = StageEvaluations(self._config, context, self._telemetry)

    def due(self, step: int) -> bool:
        """Whether any evaluation is due after `step`."""
        return self._evaluations.due(step)

    def numbers_at(self, step: int) -> dict[str, float]:
        """The numbers found after `step`; empty unless it is the last step that was evaluated."""
        return self._evaluations.numbers_at(step)

    def run_at_start(self, tokens: int) -> None:
        """Run all evaluations before the stage's first step, at which `tokens` are consumed."""
        self._batch_began = time.perf_counter()
        with self._watch.phase("evaluation", self._progress.step):
            self._evaluations.run_at_start(tokens, Path(self._config.run_dir) / "metrics.jsonl")

    def run_due(self, tokens: int) -> bool:
        """Run the evaluations that are due after the current step; whether they end the stage.

        The checkpoint of the step was saved before, and says that they are due. So a run that resumes from it runs them
        first, unless it finds the numbers that the run before found there: `Evaluated`.
        """
        progress = self._progress
        if not progress.evaluation_due:
            return False
        numbers = self._checkpoints.resumed_numbers
        self._checkpoints.resumed_numbers = None
        if numbers is None:
            numbers = self._evaluate(tokens)
        exits = self._judge_exit(numbers, tokens)
        progress.evaluation_due = False
        self._checkpoints.evaluated(progress.step, numbers)
        return exits

    def _evaluate(self, tokens: int) -> dict[str, float]:
        """Run what is due after the current step, and where that ends the stage all other evaluations, too. Returns the
        numbers found, by name."""
        step = self._progress.step
        self._batch_began = time.perf_counter()
        with self._watch.phase("evaluation", step):
            numbers = self._evaluations.run_due(step, tokens)
            verdict = self._exit.judge(step, numbers)
            if verdict is not None and verdict.met:
                numbers |= self._evaluations.run_others(step, tokens)
        return numbers

    def _judge_exit(self, numbers: dict[str, float], tokens: int) -> bool:
        """Whether the stage ends here because the evaluations' numbers meet its exit criterion. Reports it, unless an
        earlier start has done so here, with the same criterion."""
        progress = self._progress
        progress.trailing_loss = numbers.get("trailing_loss", progress.trailing_loss)
        verdict = self._exit.judge(progress.step, numbers)
        if verdict is None:
            return False
        if not self._is_recorded(STAGE_EXIT, self._stage, step=progress.step, message=verdict.message):
            self._telemetry.event(progress.step, tokens, STAGE_EXIT, verdict.message)
        if verdict.met:
            progress.exited_steps[self._stage.name] = progress.step - self._stage.first_step
        return verdict.met

    def _between_batches(self) -> None:
        """End the evaluation where any rank is asked to stop; called on all ranks together, before each batch."""
        if self._world.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # else all batches are in the GPU's queue before a signal comes
        now = time.perf_counter()
        self._stop_time.batch_took(now - self._batch_began)
        self._batch_began = now
        if any_rank(self._stop.requested or self._checkpoints.wants_to_stop):
            raise EvaluationStoppedError


def has_all_numbers(config: RunConfig, stage: Stage, numbers: Numbers | None) -> bool:
    """Whether `numbers` hold those of every evaluation that is due at the end of `stage`."""
    asked = enabled_evaluations(config) if stage.evaluate else []
    return all(evaluation.numbers <= (numbers or {}).keys() for evaluation in asked)
