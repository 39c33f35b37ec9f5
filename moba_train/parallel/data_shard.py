"""A rank's shard of a micro-batch.

A rank's data shard in a training stage: the sequences that it reads, the tokens of them that it holds, and the
engine that runs its attention.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.fsdp import compute_dtype
from moba_train.parallel.stage_strategy import stage_strategy
from moba_train.parallel.world import min_over_ranks


def shard_batch(batch: Batch, sequence: SequenceLayout, rank: int) -> Batch:
    """One rank's rows of a micro-batch, with the layout of the whole packed sequence.

    Positions are those of the tokens, not of the rows. Padding is token 0 at position 0 without loss; it follows the
    tokens, and no token sees it. Every loss token of the batch belongs to exactly one rank.
    """
    rows_n = sequence.local_rows(batch.loss_index, rank)
    here = rows_n >= 0
    return dataclasses.replace(
        batch.with_loss_on(rows_n[here], batch.loss_weight[here]),
        tokens=sequence.shard(batch.tokens, rank),
        labels=sequence.shard(batch.labels, rank),
        positions=sequence.shard(batch.positions, rank),
    )


BufferMemory = Callable[[Stage, MeshSizes], float | None]
"""Bytes of this rank's memory that the buffers of context parallelism may take in a stage; None, on all ranks: any."""


@dataclass(frozen=True)
class DataShard:
    """The part of every batch that is this rank's; by default all of it."""

    dp_rank: int = 0
    """Which of the sequences that are read at the same time this rank reads."""
    dp_size: int = 1
    engine: ContextParallel | None = None
    """Runs the attention and says which tokens of a sequence are here; None: all of them."""
    tp_rank: int = 0
    """Which of `tp_size` equal ranges of these tokens' rows is this rank's between the layers, and for the loss."""
    tp_size: int = 1
    computes_loss: bool = True
    """Whether the loss of these tokens is computed here; else another rank of the pipeline does."""

    def batches(self, data: StageData, stage: Stage, step: int) -> list[Batch]:
        """This rank's shards of the micro-batches of step `step` + 1, one of `stage`, whose data are `data`."""
        count = stage.batch_sequences
        first = (step - stage.first_step) * count
        micro_batches = step_batches(data, first, count, stage.micro_batch_size, self.dp_rank, self.dp_size)
        return [self.shard_batch(batch) for batch in micro_batches]

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch that its `dp_rank` reads. With tensor parallelism: the tokens that its
        group shares, with the loss of its own rows."""
        if self.engine is not None:
            batch = shard_batch(batch, self.engine.sequence(batch.layout.total), self.engine.rank)
        if self.tp_size > 1:
            batch = self._own_rows(batch)
        if not self.computes_loss:  # its weights stay: auxiliary losses of the layers here are weighted by them
            batch = dataclasses.replace(batch, loss_weight_sum=0.0, loss_tokens=0)
        return batch

    def _own_rows(self, batch: Batch) -> Batch:
        """The batch with the loss of this rank's rows."""
        rows, rest = divmod(len(batch.tokens), self.tp_size)
        assert not rest, "validation.tensor_parallel lets no such lengths through"
        first = self.tp_rank * rows
        here = (first <= batch.loss_index) & (batch.loss_index < first + rows)
        return batch.with_loss_on(batch.loss_index[here], batch.loss_weight[here], first)


class ContextEngines:
    """The context-parallel engines of a run's stages. Groups and connections are made when a stage begins, and kept for
    later stages."""

    def __init__(self, config: RunConfig, dims: ParallelDims, memory_for_buffers: BufferMemory) -> None:
        self._config = config
        self._dims = dims
        self._memory_for_buffers = memory_for_buffers
        self._engines: dict[CPStrategy, ContextParallel] = {}

    def data_shard(self, stage: Stage, sizes: MeshSizes) -> tuple[DataShard, str]:
        """This rank's shard in `stage`, and a text that says how sequences are cut and why ("" without context
        parallelism). Called on all ranks together.
        """
        world = self._dims.world
        dims = self._dims.for_stage(sizes)
        if dims.cp_group is None:
            return DataShard(dims.dp_rank, sizes.dp, None, dims.tp_rank, sizes.tp, dims.computes_loss), ""
        memory = self._memory_for_buffers(stage, sizes)
        if memory is not None:
            memory = min_over_ranks(memory)
        width = compute_dtype(self._config, world.device).itemsize
        strategy, reason = stage_strategy(self._config, stage, world.ranks_per_node, width, memory)
        if strategy not in self._engines:
            self._engines[strategy] = context_engine(strategy, dims.cp_group, world.device, world.timeout)
        engine = self._engines[strategy]
        return DataShard(dims.dp_rank, sizes.dp, engine, dims.tp_rank, sizes.tp, dims.computes_loss), reason
