"""The one training loop: stages of steps; each step is a forward and a backward pass, a judgement and an update, and
after it come a checkpoint and evaluations."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.data.loader import Prefetcher, training_data
from moba_train.data.samples import StageData
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationStoppedError
from moba_train.health.node import Disk, NodeWatch, refuse_broken_gpus
from moba_train.health.reaction import gather_evidence, transient_fault
from moba_train.health.watch import COMPARE_EVERY, Stragglers, Watch, stalls_folder
from moba_train.memory.weights import checkpoint_bytes
from moba_train.optim.spec import stage_learning_rate
from moba_train.parallel.run_lock import RunLock
from moba_train.parallel.world import World, any_rank
from moba_train.resolve.evaluations import evaluation_settings
from moba_train.resolve.run import ResolvedRun
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.evaluations import RunEvaluations, known_numbers
from moba_train.run.learner import Learner
from moba_train.run.recovery import Recovery, make_detector
from moba_train.run.reports import RunReports
from moba_train.run.resumable import check_corpora, trained_kinds
from moba_train.run.step import StepClock, StepCounts, StepLosses, StepResult, batch_flops, throughput
from moba_train.run.stop import RunStop, StoppedBeforeTrainingError, StopRequest


class RunStoppedError(Exception):
    """The run was asked to stop. Not an error of anyone's: it saves and ends in order."""


class Trainer:
    """Carries out a resolved run, from the newest checkpoint in its folder if there is any.

    `train` reads from top to bottom: stages (`_train_stages`), one of them (`_train_stage`), one step (`_step`), its
    update (`_update`).
    """

    def __init__(
        self,
        run: ResolvedRun,
        world: World,
        run_lock: RunLock,
        stop_at_step: int | None = None,
        from_scratch: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        """stop_at_step: save and leave once this number of optimizer steps is done (over all stages)
        from_scratch: begin at step 0 if no checkpoint is found, even if the run has had one
        stop: save and leave before the next step, as soon as it is requested on any rank
        """
        request = stop or StopRequest()
        request.saves = run.memory.saves
        self.world = world
        self.stop = RunStop(request, stop_at_step, world.timeout.total_seconds())
        self.clock = StepClock()
        refuse_broken_gpus(run.health.node, world)
        # What draws random numbers in a step: the dropout of adapters, and perhaps an attention kind from elsewhere.
        torch.manual_seed(run.seed + world.rank)
        self.learner = Learner(run, world)
        # Between the phases of set-up, which may each take minutes: compiling, reading a checkpoint.
        if any_rank(request.requested):
            raise StoppedBeforeTrainingError
        self.checkpoints = RunCheckpoints(run, self.learner.model, self.learner.optimizer, world, run_lock.check)
        start = self.checkpoints.start(from_scratch)
        self.progress = start.progress
        self.resolved = run.after_exit(self.progress.exited_steps)
        evaluation = run.evaluation
        numbers = known_numbers(evaluation, run.data.validation, self.stage, self.progress, start.numbers)
        again = self.progress.evaluation_due and numbers is None
        self.reports = RunReports(self.resolved, world, self.progress, start, lambda: self.tokens, again)
        telemetry = self.reports.telemetry
        self.monitors = Monitors(run, world, telemetry.stalled, self.reports.node)
        self.evaluations = RunEvaluations(
            evaluation,
            run.folders.run / "metrics.jsonl",
            world,
            progress=self.progress,
            checkpoints=self.checkpoints,
            telemetry=telemetry,
            watch=self.monitors.watch,
            stop=self.stop,
            is_recorded=self.reports.is_recorded,
            known_numbers=numbers,
        )
        self.recovery = Recovery(
            run,
            model=self.learner.model,
            optimizer=self.learner.optimizer,
            detector=make_detector(run.health.spike, self.progress),
            checkpoints=self.checkpoints,
            progress=self.progress,
            telemetry=telemetry,
        )

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.resolved.stages[self.progress.stage]

    @property
    def tokens(self) -> int:
        """Tokens consumed by the run so far."""
        return self.stage.tokens_after(self.progress.step)

    @property
    def finished(self) -> bool:
        """True if no step and no evaluation is left; False if the last stage has trained nothing, an error."""
        last = self.resolved.stages[-1]
        done = self.progress.stage == last.index and self.progress.step >= last.end_step
        return done and self.evaluations.are_complete and self.progress.steps_without_loss < last.steps

    def train(self) -> bool:
        """Train until the last stage ends (True) or until a stop is asked for (False); saved either way."""
        with ExitStack() as stack:
            stack.enter_context(closing(self.reports.telemetry))
            stack.enter_context(closing(self.monitors))
            stack.callback(self._report_saves)  # after an error the last save ends as the stack unwinds
            stack.enter_context(self.checkpoints)
            try:
                finished = self.finished or self._train_stages()
                self.stop.request.training = True  # also where nothing is left to train
                self._save()
                with self.monitors.watch.phase("last checkpoint", self.progress.step):
                    self.checkpoints.wait_for_last()
                    self._report_saves()
                    self.checkpoints.finish(self.recovery.protect())
            except BaseException as error:
                error.add_note(f"in step {self.progress.step} of stage {self.stage.name}")
                raise
        return finished

    def _train_stages(self) -> bool:
        """Train through the stages that are left; False if stopped before the end of the last one."""
        starts = self.progress.starts
        try:
            for index in range(self.progress.stage, len(self.resolved.stages)):
                starts = self._train_stage(self.resolved.stages[index], starts)
        except EvaluationStoppedError:
            text = f"the evaluations after step {self.progress.step} are not completed: a run that resumes runs them"
            self.reports.event("stop", text)
            return False
        except RunStoppedError:
            return False
        self.reports.boundary(self.stage, self.progress.boundary.compare())
        return True

    def _train_stage(self, stage: Stage, starts: dict[str, int]) -> dict[str, int]:
        """Train through the rest of a stage, whose corpora begin at `starts` (see `Progress.starts`); those of the next
        stage. A step's checkpoint comes before its evaluations, so that they never delay a save.

        Raises RunStoppedError or EvaluationStoppedError when stopped before the end.
        """
        self.monitors.watch.forget()
        with self.monitors.watch.phase("beginning of a stage", self.progress.step):
            data = self._enter(stage, starts)
        self.stop.request.training = True  # the corpora are those of the checkpoint
        if self.resolved.evaluation.at_start and self.progress.step == stage.first_step:
            self.evaluations.run_at_start(self.tokens)
        exits = self._evaluate()  # what is due at the checkpoint that the run resumes from
        load = partial(self.learner.data_shard.batches, data, stage)
        with Prefetcher(load, self.progress.step, stage.end_step, self.world.device) as prefetcher:
            while not exits and self.progress.step < stage.end_step:
                with self.clock.waiting_for_data(), self.monitors.watch.phase("waiting for data", self.progress.step):
                    batches = next(prefetcher)
                self._step(stage, batches)
                self.stop.time.step_took(self.clock.elapsed_s)
                if self._is_saved(self.progress.step):
                    self._save()
                exits = self._evaluate()
                self._report_saves()
                self.reports.stop_time(self.stop.time, self.checkpoints.last_save_s)

        steps = self.stage.steps  # fewer than those of `stage` if its criterion has ended it
        if self.progress.steps_without_loss >= steps:
            raise DataError(
                f"stage {stage.name}: no token of its {steps} batches carried loss, so nothing was trained; "
                "make the loss masks of its corpora again, or name other corpora"
            )
        return data.starts_after(steps * stage.batch_sequences)

    def _enter(self, stage: Stage, starts: dict[str, int]) -> StageData:
        """Switch to a stage, at its beginning or where the run was stopped. Returns its data."""
        run = self.resolved
        progress = self.progress
        self.clock.interrupt()
        begins = stage.index > progress.stage or progress.step == 0
        if stage.index > progress.stage:
            self.reports.boundary(self.stage, progress.boundary.compare())
            progress.begin_stage(stage.index, starts)
            self.recovery.begin_stage()
        layout = run.layouts[stage.index]
        self.learner.enter(stage, layout)
        data = training_data(run.samples, stage, progress.starts)
        corpora = check_corpora(stage, data, run.data.validation, progress)
        progress.note_data(trained_kinds(progress, run), corpora, data.chat_template)
        setting = evaluation_settings(run)[stage.index]
        self.evaluations.begin_stage(setting, self.learner.model, self.learner.data_shard)
        self.reports.telemetry.stage = stage.name
        self.stop.time.begin_stage()
        if begins:
            self.reports.stage(stage, run.stages[-1].end_step, data)
        self.reports.layout(stage, layout)
        for warning in data.warnings(stage.batch_tokens):
            self.reports.event("warning", warning)
        return data

    def _step(self, stage: Stage, batches: list[Batch]) -> None:
        """One optimizer step. Raises RunStoppedError, with nothing done, when any rank is asked to stop."""
        before = self.progress.step
        self.reports.telemetry.begin_step(before + 1)
        losses: StepLosses | None = None
        with self.monitors.watch.phase("forward and backward", before):
            counts = self._counts(stage, batches)
            if not counts.stops:
                has_loss = counts.loss_weight > 0
                self.progress.count_step(has_loss=has_loss, evaluation_due=self.evaluations.due(before + 1))
                if has_loss:
                    losses = self._forward_and_backward(batches, counts)
        if counts.stops:
            raise RunStoppedError
        if losses is None:
            self.clock.interrupt()
            self.reports.event("warning", "no token of this batch carries loss: step skipped")
            return
        with self.monitors.watch.phase("update", before):
            self._update(stage, batches, counts, losses)

    def _counts(self, stage: Stage, batches: list[Batch]) -> StepCounts:
        """Counts of the step over all ranks, the ranks that are asked to stop among them."""
        shard = self.learner.data_shard
        stop = self.stop.is_due(self.progress.step) or self.checkpoints.wants_to_stop
        flops = batch_flops(self.resolved.setup.shape, stage, batches)
        counts = StepCounts.from_rank(batches, stop, flops, self.world.size // shard.dp_size, shard.computes_loss)
        with self.monitors.stragglers.meeting():
            return counts.summed_over_ranks()

    def _forward_and_backward(self, batches: list[Batch], counts: StepCounts) -> StepLosses:
        """Accumulate the gradients of the micro-batches. Returns this rank's part of the step's losses."""
        with self.monitors.stragglers.attention(self.progress.step, self.learner.engine):
            return self.learner.accumulate(batches, counts.loss_weight, self.progress.step)

    def _update(self, stage: Stage, batches: list[Batch], counts: StepCounts, losses: StepLosses) -> None:
        """Judge the step by its loss and gradient norm, apply it unless they are a spike, and log it."""
        step = self.progress.step
        result = self._measure(stage, counts, losses)
        if not result.is_finite:
            result = self._run_again(stage, batches, counts, result)
        metrics = dict(result.numbers)
        schedule = self.resolved.optim.schedule
        metrics["lr"] = stage_learning_rate(self.resolved.stages, stage.index, schedule, self.tokens)

        report = self.recovery.judge(metrics)
        metrics |= {"spike_z_loss": report.z_loss, "spike_z_grad": report.z_grad}
        action = "apply"
        if report.level != "ok":
            self.learner.release_gradients()
            with self.monitors.watch.phase("spike", step - 1):
                action = self.recovery.act_on(
                    report,
                    stage,
                    data_shard=self.learner.data_shard,
                    batches=batches,
                    loss_sum=result.own_loss_sum,
                    metrics=metrics,
                )
        if action == "apply":
            self.reports.boundary(stage, self.progress.boundary.observe(metrics["loss"]))
            # The only wait for a save's copies: they have had the forward and backward pass to be made in.
            self.checkpoints.before_update()
            self.learner.update(metrics["lr"], metrics["grad_norm"])
            self.recovery.applied(step, self.tokens)
        self.learner.discard_gradients()

        step_s = self.clock.measure()
        if self._is_logged(step):
            metrics |= {"step_s": step_s, "data_s": self.clock.waited_s, **counts.metrics(stage.batch_tokens)}
            metrics |= result.further
            metrics |= throughput(self.resolved.setup.shape, stage, self.world, step_s, counts.flops)
            metrics |= self.monitors.stragglers.metrics(step)
            self.reports.telemetry.log(step, self.tokens, metrics)
            self.progress.count_logged()
        if action == "rollback":
            # A run that resumes now must not go on from a checkpoint of the spike. After the log: a run that resumes
            # from this checkpoint does not log its step again.
            self._save()

    def _measure(self, stage: Stage, counts: StepCounts, losses: StepLosses) -> StepResult:
        """Loss and gradient norms of the step over all ranks; those by attention kind if the step is logged."""
        kinds = stage.kinds if self._is_logged(self.progress.step) else ()
        return self.learner.measure(losses, counts.loss_weight, kinds, self.progress.step)

    def _run_again(self, stage: Stage, batches: list[Batch], counts: StepCounts, first: StepResult) -> StepResult:
        """The result of a second run of the step on the same batch with the same weights; called where the `first` is
        not finite. A second one that is finite is what an undisturbed step would have given."""
        with self.monitors.watch.phase("rerun", self.progress.step - 1):
            self.learner.release_gradients()
            evidence = gather_evidence(self.learner.model, first.own_loss_sum)
            self.learner.discard_gradients()
            second = self._measure(stage, counts, self._forward_and_backward(batches, counts))
        if second.is_finite:
            self.recovery.record_transient(transient_fault(first.numbers, second.numbers, evidence), stage)
        return second

    def _evaluate(self) -> bool:
        """Run the evaluations that are due after the current step. Returns True if they end the stage."""
        if self.progress.evaluation_due:
            self.clock.interrupt()
        exits = self.evaluations.run_due(self.tokens)
        if exits:  # later stages begin earlier than planned
            self.resolved = self.resolved.after_exit(self.progress.exited_steps)
        return exits

    def _is_saved(self, step: int) -> bool:
        """True if a checkpoint of `step` is due, as it always is after the last step of the run."""
        every = self.resolved.checkpoint.every
        return every is not None and (step % every == 0 or step == self.resolved.stages[-1].end_step)

    def _is_logged(self, step: int) -> bool:
        """True if the metrics of `step` are recorded. Those of a stage's last step are, except where its criterion ends
        it after its `tokens` are consumed and before its `max_tokens` are."""
        ends = {end for stage in self.resolved.stages for end in (stage.planned_end_step, stage.end_step)}
        return step % self.resolved.telemetry.log_every == 0 or step in ends

    def _save(self) -> None:
        """Begin to save a checkpoint of the current step, unless there is one or the recipe wants none."""
        step = self.progress.step
        if step == self.checkpoints.saved_step or not self.resolved.memory.saves:
            return
        self.clock.interrupt()
        with self.monitors.watch.phase("checkpoint", step):
            began = time.perf_counter()
            facts: dict[str, object] = {"good": self.recovery.is_calm}
            if (eval_loss := self.evaluations.numbers_at(step).get("eval_loss")) is not None:
                facts["eval_loss"] = eval_loss
            state = self.recovery.detector_state
            waited = self.checkpoints.save(self.progress, self.stage, state, facts, self.recovery.protect())
            stall = time.perf_counter() - began
        late = f", {waited:.1f} s late: the one before was still being written" if waited > 1 else ""
        self.reports.event("checkpoint", f"saving the checkpoint of step {step}{late}", checkpoint_stall_s=stall)

    def _report_saves(self) -> None:
        """Report how saves have ended; also after an error, as the run ends."""
        self.reports.saves(self.checkpoints.checkpointer)
        self.reports.copies(self.checkpoints.stores)


class Monitors:
    """Watches this rank while the run goes on, in threads of its own; made and closed on all ranks together."""

    def __init__(
        self, run: ResolvedRun, world: World, stalled: Callable[[str], None], node_problem: Callable[[str], None]
    ) -> None:
        """stalled, node_problem: get the text about a stall, or about a GPU or a disk, in the watching thread."""
        self.watch = Watch(world, stalls_folder(run.folders.run), stalled)
        folders = [run.folders.run, *([Path(run.checkpoint.fallback_dir)] if run.checkpoint.fallback_dir else [])]
        needed = checkpoint_bytes(run.setup.spec, run.optim.kind) if run.memory.saves else 0
        self._node = NodeWatch(world, [Disk(folder, needed) for folder in folders], node_problem)
        self.stragglers = Stragglers(COMPARE_EVERY * run.telemetry.log_every, world.device)

    def close(self) -> None:
        """End the threads."""
        self._node.close()
        self.watch.close()
