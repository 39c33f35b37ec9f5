"""This rank's share in a training stage: which sequences it reads, which of their tokens it holds, what attends."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.parallel.context.batch import shard_batch
from moba_train.parallel.context.choose import Scheme
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.fsdp import compute_dtype
from moba_train.parallel.scheme import stage_scheme
from moba_train.parallel.world import World, min_over_ranks
from moba_train.planning.memory import USABLE, estimate_memory


@dataclass(frozen=True)
class DataShard:
    """What of all batches is this rank's."""

    dp_rank: int = 0
    """Which of the sequences that are read at the same time."""
    dp_size: int = 1
    engine: ContextParallel | None = None
    """Runs the attention and says which tokens are here; None: whole sequences are."""
    tp_rank: int = 0
    """Which stretch of these tokens' rows is its own between the layers, and for the loss."""
    tp_size: int = 1

    def batches(self, data: StageData, stage: Stage, step: int) -> list[Batch]:
        """What this rank has of the micro-batches of the step that follows on `step` steps, of `stage` and its data."""
        first, count = (step - stage.first_step) * stage.batch_sequences, stage.batch_sequences
        micro_batches = step_batches(data, first, count, stage.micro_batch_size, self.dp_rank, self.dp_size)
        return [self.shard_batch(batch) for batch in micro_batches]

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch of its `dp_rank`; with tensor parallelism, the tokens that its group
        shares, with the loss of its own."""
        if self.engine is not None:
            batch = shard_batch(batch, self.engine.sequence(batch.layout.total), self.engine.rank)
        if self.tp_size == 1:
            return batch
        rows, rest = divmod(len(batch.tokens), self.tp_size)
        assert not rest, "config.validate_tp lets no such lengths through"
        first = self.tp_rank * rows
        here = (first <= batch.loss_index) & (batch.loss_index < first + rows)
        return batch.with_loss_on(batch.loss_index[here], batch.loss_weight[here], first)


class ContextEngines:
    """The engines of a run's stages. Groups and connections are made when a stage begins, and kept for the next."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._config, self._world = config, world
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._engines: dict[Scheme, ContextParallel] = {}

    def share(self, stage: Stage, sizes: MeshSizes) -> tuple[DataShard, str]:
        """This rank's share in `stage`, and the choice that was made, to be printed ("" without context parallelism).

        Called on all ranks together.
        """
        cp, tp, world = sizes.cp, sizes.tp, self._world
        readers = cp * tp  # of the same sequences
        dp_rank, dp_size = world.rank // readers, world.size // readers
        if cp == 1:
            return DataShard(dp_rank, dp_size, None, world.rank % tp, tp), ""
        width = compute_dtype(self._config, world.device).itemsize
        memory = self._memory_for_buffers(stage, sizes)
        scheme, why = stage_scheme(self._config, stage, world.ranks_per_node, width, memory)
        if cp not in self._groups:
            # Neighbours, so that a group spans as few nodes as it can; tensor parallelism's stand closer still.
            ranks = torch.arange(world.size).view(-1, cp, tp).mT.reshape(-1, cp)
            group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=world.timeout)
            assert group is not None
            self._groups[cp] = group
        if scheme not in self._engines:
            self._engines[scheme] = context_engine(scheme, self._groups[cp], world.device, world.timeout)
        return DataShard(dp_rank, dp_size, self._engines[scheme], world.rank % tp, tp), why

    def _memory_for_buffers(self, stage: Stage, sizes: MeshSizes) -> float | None:
        """Bytes, the same on every rank; None on a CPU, which is not asked."""
        if self._world.device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(self._world.device).total_memory
        tokens = -(-stage.micro_batch_size * stage.seq_len // sizes.cp)
        return min_over_ranks(USABLE * total - estimate_memory(self._config, sizes, tokens).total)
