"""Plan of a resolved run: the FLOPs and the predicted steps of each stage, next to its layout and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.mesh import MeshSizes, WorldSize
from moba_train.config.stages import Stage
from moba_train.errors import PlanError
from moba_train.memory.activations import StageActivations
from moba_train.memory.flops import Documents, dense_flops, real_flops, stage_documents
from moba_train.memory.moments import Memory
from moba_train.memory.pipeline import best_parts
from moba_train.model.spec import ParameterCounts
from moba_train.resolve.run import ResolvedRun, StageLayout
from moba_train.tools.plan.step_time import Machine, StageStep, attention_times, predict_step


@dataclass(frozen=True)
class StagePlan:
    """Cost of one stage. FLOPs are per token, forward and backward."""

    stage: Stage
    layout: StageLayout
    dense_flops: float
    real_flops: float
    documents: Documents
    """Documents whose attention `real_flops` and the step's time count."""

    @property
    def mesh(self) -> MeshSizes:
        """The mesh of the stage."""
        return self.layout.mesh

    @property
    def activations(self) -> StageActivations:
        """Activations that the layers keep for the backward pass."""
        return self.layout.activations

    @property
    def memory(self) -> Memory:
        """GPU memory at the step's peak."""
        return self.activations.memory

    @property
    def tokens(self) -> int:
        """Tokens of all optimizer steps; with an exit criterion the maximum, which times count as well."""
        return self.stage.end_token - self.stage.first_token


@dataclass(frozen=True)
class Plan:
    """Cost of a run on `world` GPUs of `machine`."""

    world: WorldSize
    machine: Machine
    parameters: ParameterCounts
    parts: tuple[int, ...]
    """Number of layers in each part of a pipeline; a single part without one."""
    best_parts: tuple[int, ...]
    """The split whose most expensive part costs least, over all stages."""
    stages: tuple[StagePlan, ...]
    steps: tuple[StageStep, ...]
    """Predicted steps of each stage whose steps can be predicted."""
    unpredicted: str
    """Reason why those of another stage, the first one, cannot; empty where all are predicted."""

    @property
    def seconds(self) -> float:
        """Time of all stages; infinite where that of a stage cannot be predicted."""
        return math.inf if self.unpredicted else sum(step.seconds for step in self.steps)


def make_plan(run: ResolvedRun, machine: Machine, documents: Sequence[Documents] | None = None) -> Plan:
    """The plan of a run on a known number of ranks.

    documents: those of each stage if they are known, else see `stage_documents`: attention is counted by the documents
        of the stage's corpora if these are on disk

    Raises DataError for a corpus that is found but unusable.
    """
    assert run.world is not None
    setup = run.setup
    model = setup.shape
    machine = machine._replace(ranks_per_node=run.world.ranks_per_node)
    found = documents or [stage_documents(run.samples, stage) for stage in run.stages]
    parts = setup.parts
    if run.parallel.pp > 1:
        parts = best_parts(model, run.parallel, run.stages, run.memory.checkpointing)
    stages = tuple(
        StagePlan(
            stage=stage,
            layout=layout,
            dense_flops=dense_flops(model, stage.seq_len),
            real_flops=real_flops(model, stage.attention, own.lengths) / own.tokens,
            documents=own,
        )
        for stage, layout, own in zip(run.stages, run.layouts, found, strict=True)
    )
    steps: list[StageStep] = []
    unpredicted = ""
    for item in stages:
        try:
            times = attention_times(model, item.stage, item.documents, machine)
            steps.append(predict_step(setup, run.memory.optimizer, item.stage, item.layout, times, machine))
        except PlanError as error:
            unpredicted = unpredicted or str(error)
    return Plan(run.world, machine, setup.spec.counts, setup.parts, parts, stages, tuple(steps), unpredicted)
