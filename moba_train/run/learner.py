"""One rank's part of the training: its model, its optimizer, and its shard of every batch."""

from collections.abc import Sequence

import torch

from moba_train.attention.engine import LOCAL_ENGINE, OperatorEngine
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.model.build import build_attention
from moba_train.model.feed_forward import each_kind
from moba_train.optim.gradients import Gradients
from moba_train.optim.registry import build_optimizer, set_learning_rate
from moba_train.optim.spec import set_trainable
from moba_train.parallel.activations import set_activations
from moba_train.parallel.data_shard import ContextEngines, DataShard
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.forward import accumulate_gradients
from moba_train.parallel.fsdp import sharded_model
from moba_train.parallel.world import World
from moba_train.registry import OBJECTIVES
from moba_train.resolve.run import ResolvedRun, StageLayout
from moba_train.run.step import StepLosses, StepResult


class Learner:
    """Computes the gradients of batches and applies them. Made and called on all ranks together.

    A step is `accumulate`, `measure`, and then `update` or not, and `discard_gradients`.
    """

    data_shard: DataShard
    """This rank's part of the current stage's data, and the engine of its attention."""

    def __init__(self, run: ResolvedRun, world: World) -> None:
        """Build the model with its initial weights, and its optimizer."""
        self._device = world.device
        self._compiled = run.setup.computation.compiled
        self._clip_norm = run.optim.clip_norm
        dims = ParallelDims(run.layouts[0].mesh, world, run.parallel.ep)
        self.model = sharded_model(run.setup, run.parallel, dims, run.seed)
        self.optimizer = build_optimizer(self.model, run.optim, world.device, dims.layers_group)
        self._engines = ContextEngines(dims)
        self._dims = dims
        self._gradients: Gradients | None = None

    @property
    def engine(self) -> OperatorEngine:
        """The engine that runs the attention of the current stage."""
        return self.data_shard.engine or LOCAL_ENGINE

    def enter(self, stage: Stage, layout: StageLayout) -> None:
        """Give the model the attention, engine, RoPE, trained parameters and kept activations of a stage."""
        shape = self.model.config
        if self._compiled:
            torch.compiler.reset()  # lengths that differ between stages would become variables, in slower code
        self.model.set_attention(build_attention(stage.attention, shape.head_width))
        self.model.objective = OBJECTIVES[stage.objective[0]](stage.objective[1]) if stage.objective else None
        self.model.set_rope(stage.rope)
        set_trainable(self.model, stage.trainable)
        self.data_shard = self._engines.data_shard(layout.mesh, layout.strategy)
        self.model.set_engines([self.engine] * shape.layers)
        for steps, options, modules in each_kind(self.model):
            steps.enter(modules, options, self._dims, layout.mesh, stage, self.data_shard)
        set_activations(self.model, layout.activations.layers, self._device)

    def accumulate(self, batches: Sequence[Batch], loss_weight: float, step: int) -> StepLosses:
        """Add up the gradients of the micro-batches of `step`. Returns this rank's part of the step's losses.

        loss_weight: sum of the token weights of all micro-batches and ranks
        """
        losses = StepLosses(self._device)
        self.model.largest_lse.begin_step()
        if self.model.objective is not None:
            self.model.objective.begin_step(step)
        for steps, _, modules in each_kind(self.model):
            steps.begin(modules)
        for part in accumulate_gradients(self.model, batches, loss_weight):
            losses.add(part)
        return losses

    def measure(self, losses: StepLosses, loss_weight: float, kinds: Sequence[str], step: int) -> StepResult:
        """Loss and gradient norms of `step` over all ranks. `losses`, this rank's part, is summed in place.

        kinds: attention kind of each layer if the norms by kind are wanted; else empty
        """
        own_loss_sum = losses.loss * loss_weight
        losses.all_reduce()
        # Listed once for norms and clipping, before the host waits for the norm: the GPU then waits 0.6 ms for the host
        # in the 8B's step, 4.6 before (benchmarks/LOG.md, "8K tokens").
        self._gradients = Gradients(self.model)
        further = self._gradients.norms_by_kind(kinds) if kinds else {}
        if kinds:
            further["max_lse"] = self.model.largest_lse.over_ranks().max()
        if self.model.objective is not None:
            further |= self.model.objective.measured()
        for steps, options, modules in each_kind(self.model):
            further |= steps.measure(modules, options, self.model.config.layers, self._device, step)
        return StepResult.read(losses, own_loss_sum, self._gradients.norm(), further)

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, whose norm is `grad_norm`, and take the optimizer's step."""
        gradients = self._gradients or Gradients(self.model)
        gradients.clip(self._clip_norm, grad_norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        for steps, options, modules in each_kind(self.model):
            steps.update(modules, options)

    def release_gradients(self) -> None:
        """Hold the gradients in the model alone, so that their memory is free when the model drops them: a rollback
        does so before it loads weights, and a second run of the step has gradients of its own."""
        self._gradients = None

    def discard_gradients(self) -> None:
        """Drop the gradients."""
        self._gradients = None
        self.optimizer.zero_grad()
