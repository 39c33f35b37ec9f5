"""The one training loop: stages of steps, each step a few micro-batches, with evaluation and checkpoints between."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from moba_train.attention.local import LOCAL_ENGINE
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.loader import Prefetcher, training_data
from moba_train.data.samples import StageData
from moba_train.errors import DataError
from moba_train.evals.evaluation import EvaluationStoppedError
from moba_train.health.node import Disk, NodeWatch, refuse_broken_gpus
from moba_train.health.reaction import gather_evidence, transient_fault
from moba_train.health.spike import SpikeDetector
from moba_train.health.watch import Stragglers, Watch, stalls_folder
from moba_train.memory.shortage import over_budget, shortage
from moba_train.memory.weights import checkpoint_bytes
from moba_train.model.build import build_attention
from moba_train.optim.gradients import Gradients
from moba_train.optim.registry import build_optimizer, set_learning_rate
from moba_train.optim.spec import set_trainable, stage_learning_rate
from moba_train.parallel.activations import set_activations
from moba_train.parallel.data_shard import ContextEngines, DataShard
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.run_lock import RunLock
from moba_train.parallel.world import World, any_rank
from moba_train.resolve.evaluations import evaluation_settings
from moba_train.resolve.run import ResolvedRun
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.evaluations import RunEvaluations, has_all_numbers
from moba_train.run.recovery import Recovery
from moba_train.run.reports import RunReports
from moba_train.run.resumable import check_corpora, trained_kinds
from moba_train.run.step import StepCounts, StepData, StepLosses, StepResult, batch_flops, throughput
from moba_train.run.stop import StoppedBeforeTrainingError, StopRequest, StopTime


class Trainer:
    """Takes one model through the stages of a validated recipe, from the newest checkpoint in the run folder if any."""

    data_shard: DataShard
    """This rank's part of the current stage's data, and the engine of its attention."""
    next_starts: dict[str, int]
    """Tokens of each corpus that were consumed when the stage before ended."""

    def __init__(
        self,
        config: RunConfig,
        run: ResolvedRun,
        world: World,
        run_lock: RunLock,
        stop_at_step: int | None = None,
        from_scratch: bool = False,
        stop: StopRequest | None = None,
    ) -> None:
        """`stop_at_step`: save and leave once this number of optimizer steps is done (over all stages);
        `from_scratch`: begin at step 0 where no checkpoint is found, even if the run has had one; `stop`: save and
        leave before the next step, as soon as it is requested on any rank."""
        self.config = config
        self.resolved = run
        self.world = world
        self.stop_at_step = stop_at_step
        self.stop = stop or StopRequest()
        self.stop.saves = run.memory.saves
        self.stop_time = StopTime(self.stop, world.timeout.total_seconds())
        self._measured_at: float | None = None
        """When the last step was measured, where the next one begins; None after anything that is not part of one: the
        beginning of a stage, a save, an evaluation, a batch without loss."""

        refuse_broken_gpus(run.health.node, world)
        torch.manual_seed(run.seed + world.rank)
        dims = ParallelDims(run.layouts[0].mesh, world)
        self.model = sharded_model(run.setup, run.parallel, dims, run.seed)
        self.optimizer = build_optimizer(self.model, run.optim, world.device, dims.layers_group)
        self.context_engines = ContextEngines(dims)
        if any_rank(self.stop.requested):
            raise StoppedBeforeTrainingError
        self.checkpoints = RunCheckpoints(run, self.model, self.optimizer, world, run_lock.check)
        self.progress = self.checkpoints.start(from_scratch)
        self.resolved = run = run.after_exit(self.progress.exited_steps)
        if self.progress.ends_here_now(self.stage):
            self.progress.evaluation_due = True
            if not has_all_numbers(run.evaluation, run.data.validation, self.stage, self.checkpoints.resumed_numbers):
                self.checkpoints.resumed_numbers = None
        health = run.health
        self.spikes = SpikeDetector(health.spike.window, health.spike.warn_sigma)
        if self.progress.step:
            self.spikes.load_state_dict(self.progress.spike_detector)

        self.reports = RunReports(run, world, self.progress, self.checkpoints, self.stages, tokens=lambda: self.tokens)
        self.telemetry = self.reports.telemetry
        self.watch = Watch(health.watch, world, stalls_folder(run.folders.run), self.telemetry.stalled)
        folders = [run.folders.run, *([Path(run.checkpoint.fallback_dir)] if run.checkpoint.fallback_dir else [])]
        needed = checkpoint_bytes(run.setup.spec, run.optim.kind) if run.memory.saves else 0
        disks = [Disk(folder, needed) for folder in folders]
        self.node_watch = NodeWatch(health.node, world, disks, self.reports.node)
        self.evaluations = RunEvaluations(
            run.evaluation,
            run.folders.run / "metrics.jsonl",
            world,
            progress=self.progress,
            checkpoints=self.checkpoints,
            telemetry=self.telemetry,
            watch=self.watch,
            stop=self.stop,
            stop_time=self.stop_time,
            is_recorded=self.reports.is_recorded,
        )
        self.stragglers = Stragglers(health.watch.compare_every * run.telemetry.log_every, world.device)
        self.recovery = Recovery(
            run,
            model=self.model,
            optimizer=self.optimizer,
            detector=self.spikes,
            checkpoints=self.checkpoints,
            progress=self.progress,
            telemetry=self.telemetry,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, with the steps and tokens that are known now."""
        return self.resolved.stages

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return self.stages[self.progress.stage]

    @property
    def tokens(self) -> int:
        """Tokens consumed by the run so far."""
        return self.stage.tokens_after(self.progress.step)

    @property
    def finished(self) -> bool:
        """Whether no step and no evaluation is left; false where the last stage has trained nothing, an error."""
        last = self.stages[-1]
        done = self.progress.stage == last.index and self.progress.step >= last.end_step
        evaluated = not self.progress.evaluation_due or self.checkpoints.resumed_numbers is not None
        return done and evaluated and self.progress.steps_without_loss < last.steps

    def run(self) -> bool:
        """Train until the last stage ends (True) or until a stop is asked for (False); saved either way."""
        self.stop.training = True
        with ExitStack() as stack:
            for part in (self.telemetry, self.watch, self.node_watch):
                stack.enter_context(closing(part))
            stack.callback(self._report_last_save)  # after an error it ends, with what it found, as the stack unwinds
            stack.enter_context(self.checkpoints)
            try:
                finished = self.finished or self._train_stages()
                self._save()
                with self.watch.phase("last checkpoint", self.progress.step):
                    self.checkpoints.finish(self.telemetry, self.progress.step, self.tokens, self.recovery.protect())
            except BaseException as error:
                error.add_note(f"in step {self.progress.step} of stage {self.stage.name}")
                raise
        return finished

    def _report_last_save(self) -> None:
        self.checkpoints.report(self.telemetry, self.progress.step, self.tokens)

    def _train_stages(self) -> bool:
        """Train through the stages that are left; False when stopped before their end."""
        finished = all(self._train_stage(index) for index in range(self.progress.stage, len(self.stages)))
        self.reports.boundary(self.stage, self.progress.boundary.compare() if finished else None)
        return finished

    def _train_stage(self, index: int) -> bool:
        """Train through the rest of a stage; False when stopped before its end."""
        stage = self.stages[index]
        data = self._begin(stage)
        try:
            if self.resolved.evaluation.at_start and self.progress.step == stage.first_step:
                self.evaluations.run_at_start(self.tokens)
            exits = self._evaluate()  # what is due at the checkpoint that the run resumes from
            if not exits and not self._train_steps(stage, data):
                return False
        except EvaluationStoppedError:
            text = f"the evaluations after step {self.progress.step} are not completed: a run that resumes runs them"
            self.reports.event("stop", text)
            return False

        if self.progress.steps_without_loss >= self.stage.steps:
            raise DataError(
                f"stage {stage.name}: no token of its {self.stage.steps} batches carried loss, so nothing was trained; "
                "make the loss masks of its corpora again, or name other corpora"
            )
        self.next_starts = data.starts_after(self.stage.steps * stage.batch_sequences)
        return True

    def _train_steps(self, stage: Stage, data: StageData) -> bool:
        """Train until the stage ends; False when stopped before its end. A step's checkpoint comes before its
        evaluations, so that they never delay a save. Raises EvaluationStoppedError when stopped in one."""
        load = partial(self.data_shard.batches, data, stage)
        with Prefetcher(load, self.progress.step, stage.end_step, self.world.device) as steps:
            for step_data in self._wait_for_each(steps):
                if not self._step(stage, step_data):
                    return False
                self.stop_time.step_took(time.perf_counter() - step_data.began)
                if self._is_saved(self.progress.step):
                    self._save()
                exits = self._evaluate()
                self._report_last_save()
                self.reports.stop_time(self.stop_time, self.checkpoints.last_save_s)
                if exits:
                    break
        return True

    def _evaluate(self) -> bool:
        """Run the evaluations that are due after the current step; whether they end the stage."""
        if self.progress.evaluation_due:
            self._measured_at = None
        exits = self.evaluations.run_due(self.tokens)
        if exits:  # later stages begin earlier than planned
            self.resolved = self.resolved.after_exit(self.progress.exited_steps)
        return exits

    def _wait_for_each(self, steps: Prefetcher) -> Iterator[StepData]:
        """The data of each step, as soon as it is there."""
        while True:
            asked = time.perf_counter()
            with self.watch.phase("waiting for data", self.progress.step):
                batches = next(steps, None)
            if batches is None:
                return
            began = asked if self._measured_at is None else self._measured_at
            yield StepData(batches, began, time.perf_counter() - asked)

    def _step(self, stage: Stage, data: StepData) -> bool:
        """One optimizer step; False, with nothing done, when any rank is asked to stop."""
        steps_before = self.progress.step
        with self.watch.phase("forward and backward", steps_before):
            flops = batch_flops(self.resolved.setup.shape, stage, data.batches)
            readers = self.world.size // self.data_shard.dp_size
            stop = self._wants_to_stop()
            counts = StepCounts.from_rank(data.batches, stop, flops, readers, self.data_shard.computes_loss)
            with self.stragglers.meeting():
                counts = counts.summed_over_ranks()
            if counts.stops:
                return False
            self.progress.step += 1
            self.progress.evaluation_due = self.evaluations.due(self.progress.step)
            if counts.loss_weight == 0:
                self._measured_at = None
                self.progress.steps_without_loss += 1
                self.reports.event("warning", "no token of this batch carries loss: step skipped")
                return True
            self.progress.steps_without_loss = 0
            losses = self._forward_and_backward(data, counts)
        with self.watch.phase("update", steps_before):
            self._update(stage, data, counts, losses)
        return True

    def _forward_and_backward(self, data: StepData, counts: StepCounts) -> StepLosses:
        """Accumulate the gradients of the micro-batches; this rank's part of the step's losses."""
        losses = StepLosses(self.world.device)
        with self.stragglers.attention(self.progress.step, self.data_shard.engine or LOCAL_ENGINE):
            for part in accumulate_gradients(self.model, data.batches, counts.loss_weight):
                losses.add(part)
        return losses

    def _update(self, stage: Stage, data: StepData, counts: StepCounts, losses: StepLosses) -> None:
        """Judge the step by its loss and gradient norm, apply it unless they are a spike, and log it."""
        step = self.progress.step
        result, gradients = self._result(stage, counts, losses)
        if not result.is_finite:
            del gradients  # the second run has its own
            result, gradients = self._run_again(stage, data, counts, result)
        metrics = dict(result.numbers)
        metrics["lr"] = stage_learning_rate(self.stages, stage.index, self.resolved.optim.schedule, self.tokens)

        report = self.spikes.observe(step, metrics["loss"], metrics["grad_norm"])
        metrics |= {"spike_z_loss": report.z_loss, "spike_z_grad": report.z_grad}
        action = "apply"
        if report.level != "ok":
            del gradients  # a rollback frees them before it loads weights
            with self.watch.phase("spike", step - 1):
                action = self.recovery.act_on(
                    report,
                    stage,
                    data_shard=self.data_shard,
                    batches=data.batches,
                    loss_sum=result.own_loss_sum,
                    metrics=metrics,
                )
            gradients = Gradients(self.model)  # none are left after a rollback
        if action == "apply":
            self.reports.boundary(stage, self.progress.boundary.observe(metrics["loss"]))
            gradients.clip(self.resolved.optim.clip_norm, metrics["grad_norm"])
            set_learning_rate(self.optimizer, metrics["lr"])
            self.checkpoints.before_update()
            self.optimizer.step()
            self.recovery.applied(step, self.tokens)
        del gradients
        self.optimizer.zero_grad()
        if action == "rollback":
            self._save()  # a run that resumes now must not go on from a checkpoint of the spike

        self._measured_at = time.perf_counter()
        if self._is_logged(step):
            step_s = self._measured_at - data.began
            metrics |= {"step_s": step_s, "data_s": data.waited_s, **counts.metrics(stage.batch_tokens)}
            metrics |= result.further
            metrics |= throughput(self.resolved.setup.shape, stage, self.world, step_s, counts.flops)
            metrics |= self.stragglers.metrics(step)
            self.telemetry.log(step, self.tokens, metrics)

    def _result(self, stage: Stage, counts: StepCounts, losses: StepLosses) -> tuple[StepResult, Gradients]:
        """Loss and gradient norms of the step over all ranks; `losses`: this rank's part, which is summed in place."""
        own_loss_sum = losses.loss * counts.loss_weight
        losses.all_reduce()
        gradients = Gradients(self.model)
        by_kind = gradients.norms_by_kind(stage.kinds) if self._is_logged(self.progress.step) else {}
        return StepResult.read(losses, own_loss_sum, gradients.norm(), by_kind), gradients

    def _run_again(
        self, stage: Stage, data: StepData, counts: StepCounts, first: StepResult
    ) -> tuple[StepResult, Gradients]:
        """The result of a second run of the step on the same batch with the same weights; called where the `first` is
        not finite. A second one that is finite is what an undisturbed step would have given."""
        with self.watch.phase("rerun", self.progress.step - 1):
            evidence = gather_evidence(self.model, first.own_loss_sum)
            self.optimizer.zero_grad()
            second, gradients = self._result(stage, counts, self._forward_and_backward(data, counts))
        if second.is_finite:
            self.recovery.record_transient(transient_fault(first.numbers, second.numbers, evidence), stage)
        return second, gradients

    def _is_saved(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due, as it always is after the last step of the run."""
        every = self.resolved.checkpoint.every
        return every is not None and (step % every == 0 or step == self.stages[-1].end_step)

    def _is_logged(self, step: int) -> bool:
        """Whether the metrics of `step` are recorded. Those of a stage's last step are, except where its criterion ends
        it after its `tokens` are consumed and before its `max_tokens` are."""
        ends = {end for stage in self.stages for end in (stage.planned_end_step, stage.end_step)}
        return step % self.resolved.telemetry.log_every == 0 or step in ends

    def _begin(self, stage: Stage) -> StageData:
        """Switch to `stage`, at its beginning or where the run was stopped. Returns its data."""
        self.watch.forget()
        with self.watch.phase("beginning of a stage", self.progress.step):
            return self._enter(stage)

    def _enter(self, stage: Stage) -> StageData:
        """Give the model the stage's attention, engine and RoPE, and open its data and evaluations."""
        run = self.resolved
        progress = self.progress
        self._measured_at = None
        begins = stage.index > progress.stage or progress.step == 0
        if stage.index > progress.stage:
            self.reports.boundary(self.stage, progress.boundary.compare())
            progress.boundary.begin_stage()
            progress.stage = stage.index
            progress.starts = self.next_starts
            progress.trailing_loss_before = progress.trailing_loss
            progress.steps_without_loss = 0
            self.spikes.rebaseline()
        progress.trained_kinds = trained_kinds(progress, run)
        if run.setup.computation.compiled:
            torch.compiler.reset()  # lengths that differ between stages would become variables, in slower code
        self.model.set_attention(build_attention(stage.attention, run.setup.shape.head_width))
        self.model.set_rope(stage.rope)
        set_trainable(self.model, stage.trainable)
        layout = run.layouts[stage.index]
        self.data_shard = self.context_engines.data_shard(layout.mesh, layout.strategy)
        self.model.set_engines([self.data_shard.engine or LOCAL_ENGINE] * run.setup.shape.layers)
        activations = layout.activations
        set_activations(self.model, activations.layers, self.world.device)
        data = training_data(run.samples, stage, progress.starts)
        check_corpora(stage, data, run.data.validation, progress)
        self.evaluations.begin_stage(evaluation_settings(run)[stage.index], self.model, self.data_shard)
        self.telemetry.stage = stage.name
        self.stop_time.begin_stage()
        if begins:
            self.reports.stage(stage, self.stages[-1].end_step)
        if layout.reason:
            self.reports.event("parallel", layout.reason)
        self.reports.activations(activations)
        gpu = run.device.gpu if run.device is not None else None
        if missing := shortage(stage.name, activations.memory, gpu):
            self.reports.event("warning", f"{missing}; `moba-train plan` names changes that fit")
        if excess := over_budget(stage.name, activations.memory, run.memory.gpu_bytes):
            self.reports.event("warning", excess)
        for repeated in data.repeats(stage.batch_tokens):
            self.reports.event("warning", repeated)
        return data

    def _save(self) -> None:
        """Begin to save a checkpoint of the current step, unless there is one or the recipe wants none."""
        step = self.progress.step
        if step == self.checkpoints.saved_step or self.resolved.checkpoint.every is None:
            return
        self._measured_at = None
        with self.watch.phase("checkpoint", step):
            began = time.perf_counter()
            self.progress.spike_detector = self.spikes.state_dict()
            self.progress.stage_end = self.stage.end_step
            self.progress.stage_planned_end = self.stage.planned_end_step
            facts: dict[str, object] = {"stage": self.stage.name, "good": self.spikes.is_calm(step)}
            if (eval_loss := self.evaluations.numbers_at(step).get("eval_loss")) is not None:
                facts["eval_loss"] = eval_loss
            waited = self.checkpoints.save(self.progress, facts, self.recovery.protect())
            stall = time.perf_counter() - began
            late = f", {waited:.1f} s late: the one before was still being written" if waited > 1 else ""
            self.reports.event("checkpoint", f"saving the checkpoint of step {step}{late}", checkpoint_stall_s=stall)

    def _wants_to_stop(self) -> bool:
        due = self.stop_at_step is not None and self.progress.step >= self.stop_at_step
        return self.stop.requested or due or self.checkpoints.wants_to_stop
