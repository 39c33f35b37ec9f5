"""The one training loop: stages of steps, each step a few micro-batches, with evaluation and checkpoints between."""

import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from moba_train.attention.local import LOCAL_ENGINE
from moba_train.checkpoint.run import RunCheckpoints
from moba_train.config.load import dump_config
from moba_train.config.mesh import mesh_sizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage, resolve_stages
from moba_train.data.batch import Batch
from moba_train.data.loader import Prefetcher
from moba_train.data.samples import StageData
from moba_train.data.stage_data import training_data
from moba_train.evals.stage import StageEvaluation
from moba_train.health.recovery import Recovery
from moba_train.health.spike import SpikeDetector
from moba_train.health.stragglers import Stragglers
from moba_train.health.watch import Watch, stalls_folder
from moba_train.model.build import build_attention
from moba_train.optim.adamw import build_optimizer
from moba_train.optim.gradients import clip_gradients, gradient_norm, norms_by_kind
from moba_train.optim.schedule import stage_learning_rate
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.mesh import build_mesh
from moba_train.parallel.stage import ContextEngines, Share
from moba_train.parallel.world import World
from moba_train.pictures import draw_pictures
from moba_train.telemetry.code_version import code_version, describe
from moba_train.telemetry.factory import make_telemetry
from moba_train.telemetry.telemetry import Telemetry
from moba_train.telemetry.throughput import throughput


class Trainer:
    """Takes one model through the stages of a validated recipe, from the newest checkpoint in the run folder if any."""

    share: Share
    """Of this rank in the current stage."""
    evaluation: StageEvaluation
    """Of the current stage."""
    next_starts: dict[str, int]
    """What the stage before left: tokens consumed of each corpus."""

    def __init__(self, config: RunConfig, world: World, stop_at_step: int | None = None) -> None:
        """`stop_at_step`: save and leave once so many optimizer steps are done (over all stages)."""
        self.config, self.world = config, world
        self.run_dir = Path(config.run_dir)
        self.stop_at_step, self.stop_requested = stop_at_step, False

        torch.manual_seed(config.seed + world.rank)
        mesh = build_mesh(mesh_sizes(resolve_stages(config)[0].parallel, world.size), world)
        self.model = sharded_model(config, mesh, world.device)
        self.optimizer = build_optimizer(self.model, config.optim, world.device)
        self.context_engines = ContextEngines(config, world)
        self.checkpoints = RunCheckpoints(config, self.model, self.optimizer, world)
        self.progress = self.checkpoints.start()
        self.stages = resolve_stages(config, self.progress.gated_steps)
        health = config.health
        self.spikes = SpikeDetector(health.spike.window, health.spike.warn_sigma)
        if self.progress.step:
            self.spikes.load_state_dict(self.progress.spike_detector)

        self.telemetry = Telemetry([])
        if world.is_main:
            (self.run_dir / "config.yaml").write_text(dump_config(config))
            run_id, resumed_step = self.progress.run_id, self.progress.step or None
            self.telemetry = make_telemetry(config, self.run_dir, run_id, resumed_step, self.stages[-1].end_step)
        self.telemetry.stage = self.stage.name
        self._event("code", describe(code_version()))

        if self.progress.step:
            where = f"resumed from the checkpoint of step {self.progress.step}, in stage {self.stage.name}"
            self._event("resume", where)
        self.watch = Watch(health.watch, world, stalls_folder(self.run_dir), self.telemetry.stalled)
        self.stragglers = Stragglers(health.watch.compare_every * config.telemetry.log_every, world.device)
        self.recovery = Recovery(
            config, self.model, self.optimizer, self.spikes, self.checkpoints, self.progress, self.telemetry
        )

    @property
    def stage(self) -> Stage:
        """The current one."""
        return self.stages[self.progress.stage]

    @property
    def tokens(self) -> int:
        """Consumed so far."""
        return self.stage.tokens_after(self.progress.step)

    def run(self) -> bool:
        """Train until the last stage ends (True) or until a stop is asked for (False); saved either way."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        with closing(self.telemetry), closing(self.watch), self.checkpoints:
            try:
                finished = all(self._train_stage(index) for index in range(self.progress.stage, len(self.stages)))
                self._report_boundary(self.progress.boundary.compare() if finished else None)
                self._save()
                self.watch.enter("last checkpoint", self.progress.step)
                self.checkpoints.finish(self.telemetry, self.progress.step, self.tokens)
            except BaseException as error:
                error.add_note(f"in step {self.progress.step} of stage {self.stage.name}")
                raise
        if self.world.is_main:
            draw_pictures(self.run_dir)
        return finished

    def _train_stage(self, index: int) -> bool:
        """Train through the rest of a stage; False when stopped before its end."""
        stage = self.stages[index]
        data = self._enter(stage)
        load = partial(self.share.batches, data, stage)
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
                gate_opened = self.evaluation.after_step(self.progress, self.tokens)
                if gate_opened:  # the stage ends here, and later ones begin so much earlier
                    self.progress.gated_steps[stage.name] = self.progress.step - stage.first_step
                    self.stages = resolve_stages(self.config, self.progress.gated_steps)
                if self.progress.step % self.config.checkpoint.every == 0:
                    self._save()
                self.checkpoints.report(self.telemetry, self.progress.step, self.tokens)
                if gate_opened:
                    break
                self.watch.enter("waiting for data", self.progress.step)
                began = time.perf_counter()

        self.next_starts = data.starts_after(self.stage.steps * stage.batch_sequences)
        return True

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
        step = self.progress.step
        if loss_weight == 0:
            self._event("warning", "no token of this batch carries loss: step skipped")
            return

        loss = torch.zeros((), device=self.world.device)
        with self.stragglers.attention(step, self.share.engine or LOCAL_ENGINE):
            for batch in batches:
                batch_loss = self.model(batch.tokens, batch.positions, batch.layout, batch.loss_on) / loss_weight
                batch_loss.backward()
                loss += batch_loss.detach()
        self.watch.enter("update", step - 1)
        own_loss_sum = loss * loss_weight
        dist.all_reduce(loss)
        logged = step % self.config.telemetry.log_every == 0
        by_kind = norms_by_kind(self.model, stage.kinds) if logged else {}
        grad_norm = gradient_norm(self.model)
        metrics = dict(zip(("loss", "grad_norm"), torch.stack([loss, grad_norm]).tolist(), strict=True))
        metrics["lr"] = stage_learning_rate(self.stages, stage.index, self.config.optim.schedule, self.tokens)

        report = self.spikes.observe(step, metrics["loss"], metrics["grad_norm"])
        metrics |= {"spike_z_loss": report.z_loss, "spike_z_grad": report.z_grad}
        action = "apply"
        if report.level != "ok":
            self.watch.enter("spike", step - 1)
            action = self.recovery.act_on(report, stage, self.share, batches, own_loss_sum, metrics)
        if action == "apply":
            self._report_boundary(self.progress.boundary.observe(metrics["loss"]))
            clip_gradients(self.model, self.config.optim.clip_norm, grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = metrics["lr"]
            self.checkpoints.before_update()
            self.optimizer.step()
        self.optimizer.zero_grad()
        if action == "rollback":
            self._save()  # whoever resumes now must not go on from a checkpoint of the spike

        if logged:
            step_s = time.perf_counter() - began
            metrics |= {"step_s": step_s, "data_s": waited, **counts}
            metrics |= {key: norm.item() for key, norm in by_kind.items()}
            metrics |= throughput(self.config.model, stage, self.world, step_s) | self.stragglers.metrics(step)
            metrics["padding_fraction"] = sum(b.padding for b in batches) / sum(b.layout.total for b in batches)
            self.telemetry.log(step, self.tokens, metrics)

    def _enter(self, stage: Stage) -> StageData:
        """Give the model the stage's attention, engine and RoPE, and open its data."""
        config, progress = self.config, self.progress
        self.watch.forget()
        self.watch.enter("beginning of a stage", progress.step)
        if stage.index > progress.stage:
            self._report_boundary(progress.boundary.compare())
            progress.boundary.begin_stage()
            progress.stage, progress.starts = stage.index, self.next_starts
            progress.trailing_loss_before = progress.trailing_loss
            self.spikes.rebaseline()
        if config.compile:
            torch.compiler.reset()  # else lengths that differ between stages become variables, in slower code
        self.model.set_attention(build_attention(stage.attention, config.model.head_width))
        self.model.set_rope(stage.rope)
        self.share, choice = self.context_engines.share(stage, mesh_sizes(stage.parallel, self.world.size))
        self.model.set_engines([self.share.engine or LOCAL_ENGINE] * config.model.layers)
        data = training_data(config, stage, progress.starts)
        data.check_fingerprints(progress.fingerprints)
        progress.fingerprints |= data.fingerprints
        self.evaluation = StageEvaluation(
            config, stage, self.model, self.share, self.world.device, self.telemetry, progress.trailing_loss_before
        )
        self.telemetry.stage = stage.name
        facts = {"stage_index": stage.index, "seq_len": stage.seq_len, "last_step": self.stages[-1].end_step}
        self._event("stage", stage.describe(), **facts)
        if choice:
            self._event("parallel", choice)
        return data

    def _save(self) -> None:
        step = self.progress.step
        if step == self.checkpoints.saved_step:
            return
        self.watch.enter("checkpoint", step)
        began = time.perf_counter()
        self.progress.spike_detector = self.spikes.state_dict()
        facts: dict[str, object] = {"stage": self.stage.name, "good": self.spikes.is_calm(step)}
        if self.evaluation.validated_step == step:
            facts["eval_loss"] = self.evaluation.validation_loss
        waited = self.checkpoints.save(self.progress, facts, self.recovery.protect())
        stall = time.perf_counter() - began
        late = f", {waited:.1f} s late: the one before was still being written" if waited > 1 else ""
        self._event("checkpoint", f"saving the checkpoint of step {step}{late}", checkpoint_stall_s=stall)

    def _report_boundary(self, losses: tuple[float, float] | None) -> None:
        if losses is None:
            return
        before, after = losses
        text = f"loss {before:.4f} before stage {self.stage.name}, {after:.4f} at its beginning: {after - before:+.4f}"
        self._event("boundary", text, loss_before=before, loss_after=after, loss_step=after - before)

    def _event(self, kind: str, message: str, **fields: Any) -> None:
        self.telemetry.event(self.progress.step, self.tokens, kind, message, **fields)

    def _wants_to_stop(self) -> bool:
        due = self.stop_at_step is not None and self.progress.step >= self.stop_at_step
        return self.stop_requested or due

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop_requested = True
