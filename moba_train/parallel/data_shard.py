"""A rank's data shard in a stage: the sequences that it reads, the tokens of them that it holds, and the engine that
runs its attention."""

import dataclasses
from dataclasses import dataclass

from moba_train.config.mesh import MeshSizes
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.dims import ParallelDims


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


@dataclass(frozen=True)
class DataShard:
    """The part of every batch that is this rank's; by default all of it."""

    dp_rank: int = 0
    """Number, out of `dp_size`, of the sequences read at the same time that this rank reads."""
    dp_size: int = 1
    engine: ContextParallel | None = None
    """Runs the attention and says which tokens of a sequence are here; None: all of them."""
    tp_rank: int = 0
    """Number, out of `tp_size`, of the equal range of these tokens' rows that this rank has between the layers, and for
    the loss."""
    tp_size: int = 1
    computes_loss: bool = True
    """True: the loss of these tokens is computed here, not on another rank of the pipeline."""

    def batches(self, data: StageData, stage: Stage, step: int) -> list[Batch]:
        """This rank's shards of the micro-batches of step `step` + 1, one of `stage`, whose data are `data`."""
        count = stage.batch_sequences
        # A pure function of the step: nothing about the data's position has to be kept but the step's number.
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
        assert not rest, "resolve/layout.py lets no such lengths through"
        first = self.tp_rank * rows
        here = (first <= batch.loss_index) & (batch.loss_index < first + rows)
        return batch.with_loss_on(batch.loss_index[here], batch.loss_weight[here], first)


class ContextEngines:
    """The context-parallel engines of a run's stages. Groups and connections are made when a stage begins, and kept for
    later stages."""

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims
        self._engines: dict[CPStrategy, ContextParallel] = {}

    def data_shard(self, mesh: MeshSizes, strategy: CPStrategy | None) -> DataShard:
        """This rank's shard in a stage with this mesh and strategy (None: without context parallelism). Called on all
        ranks together."""
        world = self._dims.world
        dims = self._dims.for_stage(mesh)
        engine = None
        if strategy is not None:
            assert dims.cp_group is not None
            if strategy not in self._engines:
                self._engines[strategy] = context_engine(strategy, dims.cp_group, world.device, world.timeout)
            engine = self._engines[strategy]
        return DataShard(dims.dp_rank, mesh.dp, engine, dims.tp_rank, mesh.tp, dims.computes_loss)
