"""Judgement of steps and reactions to spikes: dump the step, and skip it, roll the run back to a good checkpoint, or
end the run. Faults of the machine are recorded, and end the run where there are too many."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_good, latest_checkpoint, saved_step
from moba_train.config.health import SpikeConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.errors import CheckpointError, ReproducibleFaultError, SuspectNodeError, TrainingError
from moba_train.health.dump import write_dump
from moba_train.health.reaction import (
    Action,
    TransientFault,
    good_before,
    react,
    reproducible_fault,
    too_many_transient,
)
from moba_train.health.spike import SpikeDetector, SpikeReport
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.resolve.run import ResolvedRun
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.progress import Progress
from moba_train.telemetry.telemetry import Telemetry


def make_detector(config: SpikeConfig, progress: Progress) -> SpikeDetector:
    """The spike detector of a run that goes on from `progress`."""
    detector = SpikeDetector(config.window, config.warn_sigma)
    if progress.step:
        detector.load_state_dict(progress.spike_detector)
    return detector


class Recovery:
    """Carries out what `react` decides, the same on all ranks, and records it in `progress`."""

    def __init__(
        self,
        run: ResolvedRun,
        *,
        model: Transformer,
        optimizer: Optimizer,
        detector: SpikeDetector,
        checkpoints: RunCheckpoints,
        progress: Progress,
        telemetry: Telemetry,
    ) -> None:
        self._run = run
        self._model = model
        self._optimizer = optimizer
        self._detector = detector
        self._checkpoints = checkpoints
        self._progress = progress
        self._telemetry = telemetry
        self._applied = (progress.step, progress.step)
        """The last two steps that were applied, or the one that the run resumed from."""

    def judge(self, numbers: Mapping[str, float]) -> SpikeReport:
        """Judge the current step by its `loss` and its `grad_norm`."""
        return self._detector.observe(self._progress.step, numbers["loss"], numbers["grad_norm"])

    def begin_stage(self) -> None:
        """Judge the steps that follow by themselves: a stage that begins may have another loss."""
        self._detector.rebaseline()

    @property
    def detector_state(self) -> dict[str, Any]:
        """State of the spike detector, for a checkpoint."""
        return self._detector.state_dict()

    @property
    def is_calm(self) -> bool:
        """True if the current step, and those that a checkpoint of it depends on, were not flagged."""
        return self._detector.is_calm(self._progress.step)

    def applied(self, step: int, tokens: int) -> None:
        """Call this when `step` has been judged and is applied; `tokens` are consumed after it."""
        self._applied = (self._applied[1], step)
        for saved in self._checkpoints.trust.trust_again():
            text = f"the checkpoint of step {saved} is used again: the fault was not in it, as this step is finite"
            self._telemetry.event(step, tokens, "warning", text)

    def record_transient(self, fault: TransientFault, stage: Stage) -> None:
        """Record that the current step was finite only when it was run again, before its update. Raises
        SuspectNodeError when this happens too often."""
        progress = self._progress
        step = progress.step
        progress.note_transient_fault(fault.hosts)
        ends = too_many_transient(progress.transient_faults, step)
        text = "; ".join(filter(None, (fault.message, ends)))
        tokens = stage.tokens_after(step)
        self._telemetry.event(step, tokens, "fault", text, fault="transient", ranks=fault.ranks, hosts=fault.hosts)
        self._telemetry.alert(f"a transient fault at step {step}", text, "fault")
        if ends:
            kept = self._named(self._checkpoints.last_finite())
            raise SuspectNodeError(f"step {step} of stage {stage.name}: {text}. The step was not applied; {kept}")

    def _named(self, last: tuple[int, Path] | None) -> str:
        """Says which checkpoint the run has, by its step and folder."""
        if last is None:
            return f"there is no checkpoint yet (checkpoint.every is {self._run.checkpoint.every})"
        step, folder = last
        return f"the last checkpoint is step {step} in {folder}"

    def act_on(
        self,
        report: SpikeReport,
        stage: Stage,
        *,
        data_shard: DataShard,
        batches: list[Batch],
        loss_sum: Tensor,
        metrics: dict[str, float],
    ) -> Action:
        """React to the report of the current step, before its update; the step is only applied if this is "apply".

        `batches`: this rank's part of the step; `loss_sum`: sum of its weighted token losses; `metrics`: numbers of the
        step, for the dump. Raises TrainingError when the run cannot go on.
        """
        progress = self._progress
        step = progress.step
        run_dir = self._run.folders.run
        tokens = stage.tokens_after(step)
        reaction = react(self._run.health.spike, report, step, progress.skipped, progress.rollbacks)
        text = "; ".join(filter(None, (report.message, self._model.largest_lse.suspect(), reaction.message)))
        fault = show = ""
        facts: dict[str, Any] = {"level": report.level, "action": reaction.action}
        if report.level != "warn" or not report.continues:
            head = {"step": step, "stage": stage.name, "tokens": tokens, "message": text, **facts, **metrics}
            head["max_lse_of_heads"] = self._model.largest_lse.over_ranks().tolist()
            dump = write_dump(
                run_dir,
                head,
                model=self._model,
                kinds=stage.kinds,
                data_shard=data_shard,
                batches=batches,
                loss_sum=loss_sum,
            )
            facts |= dump.gate
            if dump.path is not None:
                facts["dump"] = str(dump.path)
                show = f"`moba-train inspect-spike {quote(str(run_dir))} --step {step}` shows {dump.path}"
            if report.level == "fatal":  # the step was run twice
                fault, documents = reproducible_fault(dump.ranks)
                self._telemetry.event(step, tokens, "fault", fault, fault="reproducible", documents=documents)
        stops = reaction.action == "stop"  # the error then says where to look
        said = "; ".join(filter(None, (text, "" if stops else show)))
        self._telemetry.event(step, tokens, "spike", said, **facts)
        alert = "; ".join(filter(None, (said, fault)))
        self._telemetry.alert(f"{report.level} at step {step}", alert, f"spike_{report.level}")
        # Before the run ends: the next start must not take the same weights again.
        doubt = self._doubt_checkpoint(report) if report.level == "fatal" else ""
        if doubt:
            self._telemetry.event(step, tokens, "warning", doubt)
        end = ReproducibleFaultError if report.level == "fatal" else TrainingError
        text = text.removeprefix(f"step {step}: ")
        try:
            if stops:
                raise end(self._account(stage, text, fault, doubt, show, fatal=report.level == "fatal"))
            self._carry_out(reaction.action, stage, end)
        except TrainingError as error:
            if report.level == "fatal":
                self._checkpoints.trust.end(error, fatal=True)
            raise
        return reaction.action

    def _account(self, stage: Stage, text: str, fault: str, doubt: str, show: str, fatal: bool) -> str:
        """Message of a run that ends at the current step: what happened, what is kept, and what to try."""
        checkpoints = self._checkpoints
        run = self._run
        last = checkpoints.last_finite()
        if last is not None:
            kept = f"{self._named(last)}; {self._goes_on(last[0], doubt, fatal)}{self._from_before()}"
        else:
            kept = f"metrics and dumps in {run.folders.run}; {self._named(last)}, so the same command begins again"
        if self._applied[1]:
            warm_up = (stage.schedule or run.optim.schedule).warmup_tokens
            advice = (
                f"a lower {stage.key('lr')} ({stage.lr:g} now), a longer {stage.key('schedule')}.warmup_tokens "
                f"({warm_up} now)"
            )
            if run.health.spike.reaction == "log":
                advice += ", or health.spike.reaction: skip_step, which leaves such steps out"
        else:
            initial = f"model.init_std ({run.setup.shape.init_std:g} now)"
            if run.init_from is not None:
                initial = f"other weights than init_from ({run.init_from})"
            advice = (
                f"{initial}, other corpora, or precision.compute: fp32; no step was applied yet, so it is not optim.lr"
            )
        lines = [("found", fault), ("kept", kept), ("look at", show), ("try", advice)]
        return "\n".join(
            [
                f"step {self._progress.step} of stage {stage.name}: {text}. The step was not applied",
                *(f"  {label + ':':<9}{line}" for label, line in lines if line),
            ]
        )

    def _goes_on(self, last: int, doubt: str, fatal: bool) -> str:
        """Clause that says from which checkpoint the next start goes on. `last`: step of the last finite one."""
        if doubt and last == self._checkpoints.saved_step:
            return doubt
        if fatal and last == self._checkpoints.begun.step and self._run.checkpoint.every is not None:
            return (
                "this start resumed from it and has saved no newer one to go on from, so that the same command passes "
                "over it and takes an older one, if there is one"
            )
        return "the same command goes on from the newest that is intact and finite"

    def _from_before(self) -> str:
        """End of a sentence that says how to go on from before the spike, as a rollback would, if the same command goes
        on from a later checkpoint; else empty. Called when no save is running."""
        progress = self._progress
        if self._run.health.spike.reaction != "rollback":
            return ""
        folder = self._checkpoints.folder
        good = good_before(progress.step, {*progress.skipped, progress.step}, progress.rollbacks)
        resumable = self._checkpoints.is_resumable
        try:
            newest = latest_checkpoint(folder, resumable)
            path = latest_checkpoint(folder, lambda meta: resumable(meta) and good(meta))
        except UnreadableError:
            return ""
        step = saved_step(read_meta(path)) if path is not None else None
        if step is None or path == newest:
            return ""
        return f"; to go on from before the spike, move those newer than step {step} out of {folder} first"

    def _doubt_checkpoint(self, report: SpikeReport) -> str:
        """Mark the newest checkpoint if no step was applied since: its weights are the ones that failed. Returns the
        text about it, empty if it is not marked now.

        With skip_step, also if one was: a NaN in the optimizer's state takes a step to reach the weights, and if the
        fault lies elsewhere, the next finite step takes the mark back. The other reactions keep a checkpoint after
        which a step went well; if a start from it ends here again, `Restarts` passes over it.
        """
        checkpoints = self._checkpoints
        before_last, last = self._applied
        decisive = before_last if self._run.health.spike.reaction == "skip_step" else last
        if decisive <= checkpoints.saved_step and checkpoints.doubt(report.message):
            return (
                f"the checkpoint of step {checkpoints.saved_step} is passed over from now on, and older ones are used"
            )
        return ""

    def _carry_out(self, action: Action, stage: Stage, end: type[TrainingError]) -> None:
        """Do what was decided; an error that ends the run is an `end`."""
        match action:
            case "skip":
                self._progress.leave_out()
            case "rollback":
                self._roll_back(stage, end)

    def protect(self) -> Accept:
        """Accepts the checkpoints that must not be deleted while the current step is saved.

        With rollbacks, these are the checkpoints that a rollback could use whatever happens in the next step, and so
        not the one that is being saved.
        """
        if self._run.health.spike.reaction != "rollback":
            return is_good
        progress = self._progress
        return good_before(progress.step, {*progress.skipped}, [*progress.rollbacks])

    def _roll_back(self, stage: Stage, end: type[TrainingError]) -> None:
        """Go on after this step with weights, optimizer and detector of the last good checkpoint; raises `end` where
        there is none."""
        progress = self._progress
        step = progress.step
        tokens = stage.tokens_after(step)
        try:
            path = self._checkpoints.newest(good_before(step, {*progress.skipped, step}, progress.rollbacks))
        except UnreadableError:
            raise  # an older one would give up more steps for an error that may pass
        except CheckpointError as error:
            raise end(
                f"step {step} of stage {stage.name}: health.spike.reaction is rollback, but there is no checkpoint "
                "from before the spike to go back to; the step was not applied. Lower checkpoint.every "
                f"({self._run.checkpoint.every}), or start again. {error}"
            ) from error
        # Gradients go before weights are loaded, whose copies take memory.
        self._optimizer.zero_grad()
        saved, note = self._checkpoints.load(path)
        self._detector.load_state_dict(saved.spike_detector)
        # Losses of another stage say nothing about this one's.
        if saved.stage != stage.index:
            self._detector.rebaseline()
        progress.roll_back(saved)
        saved_stage = self._run.after_exit(progress.exited_steps).stages[saved.stage]
        text = (
            f"back to the weights of step {saved.step}; the {step - saved.step} steps since then are undone, and the "
            f"{tokens - saved_stage.tokens_after(saved.step)} tokens of their batches will not be seen again. The data "
            f"goes on at step {step + 1}{note}"
        )
        self._telemetry.event(step, tokens, "rollback", text, step_from=step, step_to=saved.step)
