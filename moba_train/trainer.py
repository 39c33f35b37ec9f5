"""The one training loop: stages of steps, each step a few micro-batches, with evaluation and checkpoints between."""

import json
import logging
import shutil
import signal
import tempfile
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.attention.local import run_local
from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.initial import load_initial_weights
from moba_train.checkpoint.load import newest_intact
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import is_good
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import TrainingTensors, load_model_and_optimizer
from moba_train.config.load import dump_config
from moba_train.config.mesh import mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.data.batch import Batch
from moba_train.data.loader import Prefetcher, step_batches
from moba_train.data.samples import StageData
from moba_train.errors import CheckpointError, LaunchError, TrainingError
from moba_train.evals.position_plot import plot_position_wise
from moba_train.evals.stage import StageEvaluation
from moba_train.health.dump import write_dump
from moba_train.health.reaction import good_before, react
from moba_train.health.spike import SpikeDetector
from moba_train.health.stragglers import Stragglers
from moba_train.health.watch import Watch
from moba_train.model.build import build_attention
from moba_train.optim.adamw import build_optimizer, clip_gradients, gradient_norm
from moba_train.optim.gradients import norms_by_kind
from moba_train.optim.schedule import stage_learning_rate
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.mesh import build_mesh
from moba_train.parallel.stage import ContextEngines, Share
from moba_train.parallel.world import World
from moba_train.planning.devices import peak_tflops
from moba_train.planning.flops import dense_flops, real_flops
from moba_train.progress import Progress, check_resumable, data_plan
from moba_train.telemetry.boundary import Boundary
from moba_train.telemetry.code_version import code_version, describe
from moba_train.telemetry.factory import make_telemetry
from moba_train.telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

STALLS = "stalls"
"""Where in the run folder the flight records of stalled ranks go."""

LAST_SAVE_S = 30.0
"""After an error, so long a running save may take to finish; when a rank is gone, it never does."""


class Trainer:
    """Takes one model through the stages of a validated recipe, from the newest checkpoint in the run folder if any."""

    def __init__(self, config: RunConfig, world: World, stop_at_step: int | None = None) -> None:
        """`stop_at_step`: save and leave once so many optimizer steps are done (over all stages)."""
        self.config, self.world = config, world
        self.run_dir = Path(config.run_dir)
        self.stages = resolve_stages(config)
        self.boundary = Boundary()
        self.stop_at_step = stop_at_step
        self.stop_requested = False

        torch.manual_seed(config.seed + world.rank)
        mesh = build_mesh(mesh_sizes(self.stages[0].parallel, world.size), world)
        self.model = sharded_model(config, mesh, world.device)
        self.optimizer = build_optimizer(self.model, config.optim, world.device)
        self.context_engines = ContextEngines(config, world)
        self._check_run_dir()
        self.share = Share()
        keep = config.checkpoint
        self.checkpointer = Checkpointer(
            self.run_dir / "checkpoints",
            Retention(keep.keep_last, keep.keep_every, keep.keep_best),
            self._may_go_back_to if config.health.spike.reaction == "rollback" else is_good,
        )
        self.spikes = SpikeDetector(config.health.spike.window, config.health.spike.warn_sigma)
        self.progress = self._resume() or self._begin()
        self.saved_step = self.progress.step
        self.reported_save: tuple[int, float] | None = None
        self.failed_save: str | None = None
        self.tensors = TrainingTensors(self.model, self.optimizer)
        if world.device.type == "cuda":
            self.checkpointer.reserve(self.tensors())
        if world.is_main:
            (self.run_dir / "config.yaml").write_text(dump_config(config))
        self.telemetry = (
            make_telemetry(config, self.run_dir, self.progress.run_id, self.progress.step or None, self.end_step)
            if world.is_main
            else Telemetry([])
        )
        self.watch = Watch(config.health.watch, world, self.run_dir / STALLS, self.telemetry.stalled)
        compared_every = config.health.watch.compare_every * config.telemetry.log_every
        self.stragglers = Stragglers(compared_every, world.device)
        stage = self.stages[self.progress.stage]
        self.telemetry.stage = stage.name
        if world.is_main:
            self.telemetry.event(self.progress.step, self._tokens(stage), "code", describe(code_version()))
        if self.progress.step:
            where = f"resumed from the checkpoint of step {self.progress.step}, in stage {stage.name}"
            self.telemetry.event(self.progress.step, self._tokens(stage), "resume", where)

    @property
    def end_step(self) -> int:
        """Optimizer steps of the whole run; of stages whose gate has not opened yet, as many as there can be."""
        return self.stages[-1].end_step

    def run(self) -> bool:
        """Train until the last stage ends (True) or until a stop is asked for (False); saved either way."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            finished = all(self._train_stage(index) for index in range(self.progress.stage, len(self.stages)))
            self._report_boundary(self.boundary.compare() if finished else None)
            self._save()
            self.watch.enter("last checkpoint", self.progress.step)
            self.checkpointer.wait()
            self._report_save()
            if self.failed_save is not None:
                raise CheckpointError(f"{self.failed_save}; mend that and give the same command again")
        except BaseException as error:
            error.add_note(f"in step {self.progress.step} of stage {self.stages[self.progress.stage].name}")
            all_ranks_end = isinstance(error, TrainingError | CheckpointError)
            self.checkpointer.close(None if all_ranks_end else LAST_SAVE_S)
            raise
        else:
            self.checkpointer.close()
        finally:
            self.watch.close()
            self.telemetry.close()
        if self.world.is_main:
            try:
                from moba_train.telemetry.plot import plot_run  # matplotlib: a quarter of the time of a restart

                plot_run(self.run_dir)
                plot_position_wise(self.run_dir)
            except Exception as error:  # the run itself is done and saved
                logger.warning("no picture of the loss: %s", error)
        return finished

    def _train_stage(self, index: int) -> bool:
        """Train through the rest of a stage; False when stopped before its end."""
        stage = self.stages[index]
        data = self._enter(stage)
        share, batch_sequences = self.share, stage.batch_sequences

        def load(step: int) -> list[Batch]:
            first = (step - stage.first_step) * batch_sequences
            micro = stage.micro_batch_size
            batches = step_batches(data, first, batch_sequences, micro, share.dp_rank, share.dp_size)
            return [share.of(batch) for batch in batches]

        with Prefetcher(load, self.progress.step, stage.end_step, self.world.device) as steps:
            self.watch.enter("waiting for data", self.progress.step)
            began = time.perf_counter()
            for batches in steps:
                waited = time.perf_counter() - began
                self.watch.enter("forward and backward", self.progress.step)
                weight, carrying = sum(b.loss_weight_sum for b in batches), sum(b.loss_tokens for b in batches)
                loss_weight, loss_tokens, ranks_without, stops = self.stragglers.meet(
                    [weight, carrying, carrying == 0, self._wants_to_stop()]
                )
                if stops:
                    return False
                counts = {
                    "loss_tokens": loss_tokens,
                    "loss_token_fraction": loss_tokens / stage.batch_tokens,
                    "ranks_with_zero_loss_tokens": ranks_without,
                }
                self._step(stage, batches, loss_weight, counts, began, waited)
                self.watch.enter("evaluation", self.progress.step)
                gate_opened = self.evaluation.after_step(self.progress, self._tokens(stage))
                if gate_opened:
                    self._end_here(stage)
                if self.progress.step % self.config.checkpoint.every == 0:
                    self._save()
                self._report_save()
                if gate_opened:
                    break
                self.watch.enter("waiting for data", self.progress.step)
                began = time.perf_counter()

        self.next_starts = data.starts_after(self.stages[index].steps * batch_sequences)
        return True

    def _end_here(self, stage: Stage) -> None:
        """The stage's gate has opened: it ends with the current step, and later ones begin so much earlier."""
        self.progress.gated_steps[stage.name] = self.progress.step - stage.first_step
        self.stages = resolve_stages(self.config, self.progress.gated_steps)

    def _step(
        self,
        stage: Stage,
        batches: list[Batch],
        loss_weight: float,
        counts: dict[str, float],
        began: float,
        waited: float,
    ) -> None:
        """One optimizer step; the loss is the sum of weighted token losses over all ranks / the sum of the weights."""
        self.progress.step += 1
        step, tokens = self.progress.step, self._tokens(stage)
        if loss_weight == 0:
            self.telemetry.event(step, tokens, "warning", "no token of this batch carries loss: step skipped")
            return

        loss = torch.zeros((), device=self.world.device)
        with self.stragglers.attention(step):
            for batch in batches:
                batch_loss = self.model(batch.tokens, batch.positions, batch.layout, batch.loss_on) / loss_weight
                batch_loss.backward()
                loss += batch_loss.detach()
        self.watch.enter("update", step - 1)
        own_loss_sum = loss * loss_weight
        dist.all_reduce(loss)
        logged = step % self.config.telemetry.log_every == 0
        by_kind = norms_by_kind(self.model, [layer.kind for layer in stage.attention]) if logged else {}
        grad_norm = gradient_norm(self.model)
        metrics = dict(zip(("loss", "grad_norm"), torch.stack([loss, grad_norm]).tolist(), strict=True))
        learning_rate = stage_learning_rate(self.stages, stage.index, self.config.optim.schedule, tokens)
        metrics["lr"] = learning_rate
        if self._spikes(stage, batches, own_loss_sum, metrics):
            self.optimizer.zero_grad()
        else:
            self._report_boundary(self.boundary.observe(metrics["loss"]))
            clip_gradients(self.model, self.config.optim.clip_norm, grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.checkpointer.before_update()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if logged:
            step_s = time.perf_counter() - began
            metrics |= {"step_s": step_s, "data_s": waited, **counts}
            metrics |= {key: norm.item() for key, norm in by_kind.items()}
            metrics |= self._throughput(stage, step_s) | self.stragglers.metrics(step)
            metrics["padding_fraction"] = sum(batch.padding for batch in batches) / sum(
                batch.layout.total for batch in batches
            )
            self.telemetry.log(step, tokens, metrics)

    def _spikes(self, stage: Stage, batches: list[Batch], own_loss_sum: Tensor, metrics: dict[str, float]) -> bool:
        """Score loss and gradient norm against the recent past, and react: True when the step must not be applied."""
        step, tokens = self.progress.step, self._tokens(stage)
        report = self.spikes.observe(step, metrics["loss"], metrics["grad_norm"])
        metrics |= {"spike_z_loss": report.z_loss, "spike_z_grad": report.z_grad}
        if report.level == "ok":
            return False
        self.watch.enter("spike", step - 1)
        spike = self.config.health.spike
        reaction = react(spike, report, step, self.progress.skipped, self.progress.rollbacks)
        text = "; ".join(filter(None, (report.message, reaction.message)))
        facts = {"level": report.level, "action": reaction.action}
        if report.level != "warn" or not report.continues:
            head = {"step": step, "stage": stage.name, "tokens": tokens, "message": report.message, **facts, **metrics}
            kinds = [layer.kind for layer in stage.attention]
            write_dump(self.run_dir, head, self.model, kinds, self.share, batches, own_loss_sum)
        self.telemetry.event(step, tokens, "spike", text, **facts)
        self.telemetry.alert(f"{report.level} at step {step}", text, f"spike_{report.level}")
        match reaction.action:
            case "skip":
                self.progress.skipped.append(step)
            case "rollback":
                self._roll_back(stage)
            case "stop":
                raise TrainingError(
                    f"step {step} of stage {stage.name}: {text}; the step was not applied. The last checkpoint is step "
                    f"{self.saved_step} in {self.run_dir / 'checkpoints'}; lower optim.lr or look at the batch "
                    f"(`moba-train inspect-spike {self.run_dir}`) before going on"
                )
        return reaction.action != "apply"

    def _roll_back(self, stage: Stage) -> None:
        """Go on after this step with weights, optimizer and detector of the last good checkpoint."""
        step, tokens = self.progress.step, self._tokens(stage)
        self.checkpointer.wait()  # it may be saving the one to go back to
        folder = self.checkpointer.folder
        problem = f"{folder} is empty"
        try:
            path = newest_intact(folder, good_before(step, {*self.progress.skipped, step}, self.progress.rollbacks))
        except CheckpointError as error:
            path, problem = None, str(error)
        if path is None:
            raise TrainingError(
                f"step {step} of stage {stage.name}: health.spike.reaction is rollback, but there is no checkpoint "
                "from before the spike to go back to; the step was not applied. Lower checkpoint.every "
                f"({self.config.checkpoint.every}), or start again. {problem}"
            )
        self.optimizer.zero_grad()
        load_model_and_optimizer(self.model, self.optimizer, path)
        saved = Progress.from_meta(read_meta(path)["progress"], len(self.stages))
        if saved.stage == stage.index:
            self.spikes.load_state_dict(saved.spike_detector)
            self.boundary = Boundary(**saved.boundary)
        else:
            self.spikes.rebaseline()
        self.progress.skipped = [old for old in self.progress.skipped if old <= saved.step]
        self.progress.rollbacks.append([step, saved.step])
        lost = tokens - self._tokens(self.stages[saved.stage], saved.step)
        text = (
            f"back to the weights of step {saved.step}; the {step - saved.step} steps since then are undone, and the "
            f"{lost} tokens of their batches will not be seen again. The data goes on at step {step + 1}"
        )
        self.telemetry.event(step, tokens, "rollback", text, step_from=step, step_to=saved.step)
        self._save()  # whoever resumes now must not go on from a checkpoint of the spike

    def _may_go_back_to(self, meta: dict[str, Any]) -> bool:
        """Whether a rollback could take a checkpoint with this meta. Not the newest: the step after it may still turn
        out to be a spike. Called by the thread that saves."""
        return good_before(self.saved_step, self.progress.skipped, self.progress.rollbacks)(meta)

    def _report_boundary(self, losses: tuple[float, float] | None) -> None:
        if losses is None:
            return
        stage, (before, after) = self.stages[self.progress.stage], losses
        text = f"loss {before:.4f} before stage {stage.name}, {after:.4f} at its beginning: {after - before:+.4f}"
        self.telemetry.event(
            self.progress.step,
            self._tokens(stage),
            "boundary",
            text,
            loss_before=before,
            loss_after=after,
            loss_step=after - before,
        )

    def _enter(self, stage: Stage) -> StageData:
        """Give the model the stage's attention, engine and RoPE, and open its data."""
        if self.progress.step > stage.end_step:
            key = f"stages[{stage.index}].{'until.max_tokens' if stage.gate else 'tokens'}"
            raise CheckpointError(
                f"{key}: stage {stage.name} now ends at step {stage.end_step}, before the checkpoint's step "
                f"{self.progress.step}; make it longer, or set run_dir to a new folder"
            )
        self.watch.forget()
        self.watch.enter("beginning of a stage", self.progress.step)
        if stage.index > self.progress.stage:
            self._report_boundary(self.boundary.compare())
            self.boundary.begin_stage()
            self.progress.stage, self.progress.starts = stage.index, self.next_starts
            self.progress.trailing_loss_before = self.progress.trailing_loss
            self.spikes.rebaseline()
        self.model.set_attention(build_attention(stage.attention, self.config.model.head_width))
        self.model.set_rope(stage.rope)
        self.share, choice = self.context_engines.share(stage, mesh_sizes(stage.parallel, self.world.size))
        self.model.set_engines([self.share.engine or run_local] * self.config.model.layers)
        data = StageData(
            stage.sources,
            stage.seq_len,
            stage.max_steps * stage.batch_sequences,
            self.config.seed,
            self.progress.starts,
            self.config.model.vocab_size,
            self.config.data.packing,
            self.config.loss_norm,
        )
        data.check_fingerprints(self.progress.fingerprints)
        surroundings = self.model, self.share, self.world.device, self.telemetry, self.progress.trailing_loss_before
        self.evaluation: StageEvaluation = StageEvaluation(self.config, stage, *surroundings)
        self.progress.fingerprints |= data.fingerprints
        self.telemetry.stage = stage.name
        kinds = [layer.kind for layer in stage.attention]
        summary = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
        steps = f"{stage.planned_steps} to {stage.max_steps}" if stage.gate else str(stage.steps)
        self.telemetry.event(
            self.progress.step,
            stage.first_token,
            "stage",
            f"stage {stage.name}: sequences of {stage.seq_len} tokens, {stage.batch_tokens} tokens per step, "
            f"{steps} steps, attention {summary}",
            stage_index=stage.index,
            seq_len=stage.seq_len,
            last_step=self.end_step,
        )
        if choice:
            self.telemetry.event(self.progress.step, stage.first_token, "parallel", choice)
        return data

    def _tokens(self, stage: Stage, step: int | None = None) -> int:
        """Tokens consumed by the run after `step`, which is in `stage`; by default after its current step."""
        step = self.progress.step if step is None else step
        return stage.first_token + (step - stage.first_step) * stage.batch_tokens

    def _throughput(self, stage: Stage, step_s: float) -> dict[str, float]:
        rate = stage.batch_tokens / step_s
        metrics = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / self.world.size}
        if self.world.device.type != "cuda":
            return metrics
        metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        peak = peak_tflops(torch.cuda.get_device_name())
        if peak is not None:
            share = metrics["tokens_per_s_per_device"] / (peak * 1e12)
            metrics["mfu"] = share * real_flops(self.config.model, stage.attention, stage.seq_len)
            metrics["mfu_dense"] = share * dense_flops(self.config.model, stage.seq_len)
        return metrics

    def _wants_to_stop(self) -> bool:
        due = self.stop_at_step is not None and self.progress.step >= self.stop_at_step
        return self.stop_requested or due

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_requested = True

    def _save(self) -> None:
        step = self.progress.step
        if step == self.saved_step:
            return
        self.watch.enter("checkpoint", step)
        began = time.perf_counter()
        stage = self.stages[self.progress.stage]
        self.progress.spike_detector = self.spikes.state_dict()
        self.progress.boundary = self.boundary.to_state()
        self.progress.data_plan = self._data_plan()
        meta: dict[str, object] = {
            "progress": self.progress.to_meta(),
            "config": dump_config(self.config),
            "stage": stage.name,
            "good": self.spikes.is_calm(step),
        }
        if self.evaluation.validated_step == step:
            meta |= {"eval_loss": self.evaluation.validation_loss}
        self.saved_step = step
        self.checkpointer.save(step, self.tensors(), meta)
        stall = time.perf_counter() - began
        message = f"saving the checkpoint of step {step}"
        self.telemetry.event(step, self._tokens(stage), "checkpoint", message, checkpoint_stall_s=stall)

    def _report_save(self) -> None:
        """Say once how the last save in the background ended; the run goes on in any case."""
        step, tokens = self.progress.step, self._tokens(self.stages[self.progress.stage])
        saved, error = self.checkpointer.last_saved, self.checkpointer.last_error
        if saved is not None and saved != self.reported_save:
            message = f"the checkpoint of step {saved[0]} is complete after {saved[1]:.1f} s"
            self.telemetry.event(step, tokens, "checkpoint", message, checkpoint_save_s=saved[1])
        if error is not None and error != self.failed_save:
            self.telemetry.event(step, tokens, "warning", error)
            self.telemetry.alert("a checkpoint was not saved", error, "checkpoint")
        self.reported_save, self.failed_save = saved, error

    def _begin(self) -> Progress:
        """A new run, from `init_from`'s weights if given."""
        if self.config.init_from is not None:
            load_initial_weights(self.model, Path(self.config.init_from))
        return Progress(run_id=self._new_run_id())

    def _resume(self) -> Progress | None:
        """Load the newest intact checkpoint of the run folder; None when there is none."""
        path = newest_intact(self.run_dir / "checkpoints")
        if path is None:
            return None
        progress = Progress.from_meta(read_meta(path).get("progress"), len(self.stages))
        self.progress = progress
        self.stages = resolve_stages(self.config, progress.gated_steps)
        check_resumable(progress.data_plan, self._data_plan(), str(path))
        load_model_and_optimizer(self.model, self.optimizer, path)
        try:
            self.spikes.load_state_dict(progress.spike_detector)
            self.boundary = Boundary(**progress.boundary)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its progress record is not from this version: {error!r}") from error
        return progress

    def _data_plan(self) -> dict[str, object]:
        plan = data_plan(self.config, self.stages[: self.progress.stage + 1])
        return json.loads(json.dumps(plan))

    def _new_run_id(self) -> str:
        ids = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(ids)
        return ids[0]

    def _check_run_dir(self) -> None:
        """Make the run folder; refuse one that cannot be written, or a disk too small for one checkpoint."""
        problem: list[str | None] = [None]
        if self.world.is_main:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.run_dir):
                    pass
                needed = 12 * sum(parameter.numel() for parameter in self.model.parameters())
                free = shutil.disk_usage(self.run_dir).free
                if free < needed:
                    problem = [f"{free / 2**30:.2f} GiB free, one checkpoint needs {needed / 2**30:.2f} GiB"]
            except OSError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem)
        if problem[0] is not None:
            raise LaunchError(f"run_dir {self.run_dir} cannot be used: {problem[0]}")
