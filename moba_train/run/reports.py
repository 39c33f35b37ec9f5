"""Reports of a run in addition to metrics: events at the current step, from its start to its end."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from moba_train.checkpoint.checkpointer import Checkpointer, Saved
from moba_train.config.load import parse_config
from moba_train.config.stages import Stage
from moba_train.data.samples import StageData
from moba_train.environment import code_version, describe_code, describe_machine
from moba_train.errors import LaunchError
from moba_train.memory.activations import StageActivations
from moba_train.memory.shortage import over_budget, shortage
from moba_train.parallel.world import World
from moba_train.resolve.run import ResolvedRun, StageLayout
from moba_train.run.checkpoints import CheckpointStore, Start, not_finite_values
from moba_train.run.evaluations import evaluation_records
from moba_train.run.progress import Progress
from moba_train.run.recipe_changes import describe_changes, rate_jump, recipe_changes, write_recipe
from moba_train.run.stop import StopTime
from moba_train.telemetry.jsonl import history_problem, read_since
from moba_train.telemetry.sinks import make_telemetry
from moba_train.telemetry.telemetry import Record, SinkRun, Telemetry

logger = logging.getLogger(__name__)

ALERT_AFTER_FAILURES = 3
"""Failed saves in a row after which an alert says how much the run can lose."""
STAGE = "stage"
"""Type of the records of a stage's beginning."""
BOUNDARY = "boundary"
"""Type of the records that compare the losses on both sides of a stage's beginning."""


class RunReports:
    """Opens the telemetry of a run, on rank 0 with real sinks, and words the events of its trainer."""

    telemetry: Telemetry

    def __init__(
        self,
        run: ResolvedRun,
        world: World,
        progress: Progress,
        start: Start,
        tokens: Callable[[], int],
        evaluates_again: bool,
    ) -> None:
        """Report what the run starts with: code, machine, weights, and the recipe if it has changed.

        tokens: gives the number consumed so far
        evaluates_again: the evaluations after the current step are run again, so that their earlier records go
        """
        self._run = run
        self._progress = progress
        self._tokens = tokens
        self._is_main = world.is_main
        self._recorded: list[Record] = []
        """Records of an earlier start at this step, also those after it had saved the step's checkpoint."""
        self._told_saves = 0
        """Number of the good saves that are reported."""
        recipe_before: str | None = None
        last_step = run.stages[-1].end_step
        resumed = progress.step or None
        described = SinkRun(run.folders.run, run.name, progress.run_id, resumed, last_step, {}, world.rank)
        if not world.is_main:
            self.telemetry = make_telemetry(run.telemetry, described)
        else:
            folder = run.folders.run
            recipe_before = write_recipe(folder, run.recipe, progress.step)
            repeated = evaluation_records() if evaluates_again else ()
            recipe = parse_config(run.recipe, "recipe").model_dump(mode="json") | {"code": code_version()}
            self.telemetry = make_telemetry(run.telemetry, replace(described, recipe=recipe), repeated)
            history = read_since(folder / "metrics.jsonl", progress.step)
            here = (record for record in history if record["step"] == progress.step)
            self._recorded = [record for record in here if record["type"] not in repeated]
        stage = run.stages[progress.stage]
        self.telemetry.stage = stage.name
        machine = describe_machine(world.device, world.size, world.ranks_per_node)
        self.event("code", describe_code(code_version()), machine=machine)
        if start.initial_weights:
            self.event("init_from", start.initial_weights)
        if progress.step:
            place = "at the end of" if progress.step == stage.end_step else "in"
            text = f"resumed from the checkpoint of step {progress.step}, {place} {stage.describe()}{start.note}"
            self.event("resume", text, checkpoint_load_s=start.seconds, **_stage_facts(stage, last_step))
            if self._is_main and (problem := history_problem(run.folders.run / "metrics.jsonl", progress.logged_steps)):
                self.event("warning", problem)
            self._recipe(start.recipe, recipe_before)

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Record an event at the current step; `fields` are JSON values."""
        self.telemetry.event(self._progress.step, self._tokens(), kind, message, **fields)

    def _recipe(self, saved: str | None, before: str | None) -> None:
        """Report the changes of the recipe since the one that the checkpoint was saved with. `before` is that of the
        start before, if it is another one."""
        changes = recipe_changes(saved, self._run.recipe) if saved is not None else {}
        where = f"the checkpoint of step {self._progress.step}"
        if changes:
            message = f"changed since {where}: {describe_changes(changes)}"
        elif before is not None and recipe_changes(before, self._run.recipe):
            message = f"again as in {where}, unlike that of the start before"
        else:
            return
        self.event("recipe", message, changed_keys=len(changes), changes=changes)
        if saved is not None and (jump := rate_jump(saved, self._run, self._progress)) is not None:
            self.event("warning", jump)

    def layout(self, stage: Stage, layout: StageLayout) -> None:
        """Report the way in which a stage is laid out, and memory that it needs and the GPUs or the recipe lack."""
        if layout.reason:
            self.event("parallel", layout.reason)
        self._activations(layout.activations)
        memory = layout.activations.memory
        gpu = self._run.device.gpu if self._run.device is not None else None
        if missing := shortage(stage.name, memory, gpu):
            self.event("warning", f"{missing}; `moba-train plan` names changes that fit")
        if excess := over_budget(stage.name, memory, self._run.memory.gpu_bytes):
            self.event("warning", excess)

    def _activations(self, found: StageActivations) -> None:
        """Report the activations that the layers of a stage keep for their backward pass, and the predicted memory;
        nothing on a CPU that keeps everything."""
        device = self._run.device
        if device is not None and device.gpu is None and found.keeps_everything:
            return
        self.event(
            "activations",
            found.describe(),
            kept=[layer.kept.name.lower() for layer in found.layers],
            on_host=[layer.on_host for layer in found.layers],
            predicted_memory_gib=found.memory.total / 2**30,
            predicted_host_gib=found.host_bytes / 2**30,
        )

    def stage(self, stage: Stage, last_step: int, data: StageData) -> None:
        """Report that `stage` begins, unless an earlier start has done so at this step, in the same words; `last_step`:
        last step of the run, as far as that is known."""
        facts = {"message": stage.describe(), **_stage_facts(stage, last_step)}
        facts |= {"tokens_by_length": data.tokens_by_length()} if self._is_main else {}
        if not self.is_recorded(STAGE, stage, step=self._progress.step, **facts):
            self.event(STAGE, **facts)

    def boundary(self, stage: Stage, losses: tuple[float, float] | None) -> None:
        """Report the mean losses before and after the beginning of `stage`, where they are known, unless an
        earlier start has done so."""
        if losses is None or self.is_recorded(BOUNDARY, stage):
            return
        before, after = losses
        text = f"loss {before:.4f} before stage {stage.name}, {after:.4f} at its beginning: {after - before:+.4f}"
        self.event(BOUNDARY, text, loss_before=before, loss_after=after, loss_step=after - before)

    def is_recorded(self, event_type: str, stage: Stage, **fields: Any) -> bool:
        """True if an earlier start recorded such an event of `stage` at the step from which the run resumed."""
        wanted = {"type": event_type, "stage": stage.name, **fields}
        return any(wanted.items() <= record.items() for record in self._recorded)

    def saves(self, checkpointer: Checkpointer) -> None:
        """Report once how the saves so far have ended; the run goes on in any case."""
        saves = checkpointer.saves[self._told_saves :]
        errors = [checkpointer.errors.pop(0) for _ in range(len(checkpointer.errors))]
        self._told_saves += len(saves)
        for saved in saves:
            self._saved(saved)
        if not errors or isinstance(checkpointer.fatal, LaunchError):
            return
        for error in errors:
            self.event("warning", error)
            self.telemetry.alert("a checkpoint was not saved", error, "checkpoint")
        self._failures_in_a_row(checkpointer.failed_saves, checkpointer.last_saved)

    def _failures_in_a_row(self, failed: int, last_saved: Saved | None) -> None:
        if failed < ALERT_AFTER_FAILURES:
            return
        last = f"after step {last_saved.step}" if last_saved is not None else "since this start of the run"
        text = f"{failed} saves in a row have failed: all that is trained {last} is lost if the run ends now"
        if self._is_main:
            logger.error("%s", text)
        self.event("warning", text, failed_saves=failed)
        self.telemetry.alert("no checkpoint can be saved", text, "failed_saves")

    def _saved(self, saved: Saved) -> None:
        message = f"the checkpoint of step {saved.step} is complete after {saved.seconds:.1f} s"
        times = {"checkpoint_save_s": saved.seconds, "checkpoint_check_s": saved.check_s}
        self.event("checkpoint", message, **times)
        if saved.problem is not None:
            where = f"the checkpoint of step {saved.step} is in {saved.folder}"
            text = f"{where}, because elsewhere it failed: {saved.problem}"
            self.event("warning", text)
            self.telemetry.alert("a checkpoint is in checkpoint.fallback_dir", text, "checkpoint_fallback")
        if saved.not_finite:
            values = not_finite_values(saved.not_finite)
            text = f"the checkpoint of step {saved.step} holds {values}; the run will not resume from it"
            self.event("warning", text)
            self.telemetry.alert("a checkpoint is not finite", text, "not_finite")

    def copies(self, stores: Iterable[CheckpointStore]) -> None:
        """Report once how the copies of checkpoints so far have ended."""
        for text, is_good in (news for store in stores for news in store.news()):
            if is_good:
                self.event("checkpoint", text)
            else:
                self.event("warning", text)
                self.telemetry.alert("a checkpoint was not copied", text, "checkpoint_copy")

    def stop_time(self, stop_time: StopTime, save_s: float | None) -> None:
        """Report how long an orderly stop takes, where that is known for the first time or has become longer;
        `save_s`: how long the last save took."""
        if save_s is not None:
            stop_time.save_took(save_s)
        if (news := stop_time.news()) is not None:
            self.event("stop_time", news, stop_s=stop_time.seconds)

    def node(self, text: str) -> None:
        """Ask for attention to a GPU or a disk; called by the thread that watches them."""
        self.telemetry.alert("a GPU or a disk has a problem", text, "node")


def _stage_facts(stage: Stage, last_step: int) -> dict[str, Any]:
    return {"stage_index": stage.index, "seq_len": stage.seq_len, "last_step": last_step}
