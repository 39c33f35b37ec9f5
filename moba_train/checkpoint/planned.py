"""torch.distributed.checkpoint's (DCP's) `save`, with one save plan for all saves.

The save plan says which rank writes which part of which tensor. For a thousand tensors it takes most of a second of
Python, more with more ranks, and meanwhile the training thread of the same process hardly gets a turn. So one save plan
serves all saves of the same tensors, and a save is little more than writing
(benchmarks/results/checkpoint-python-cpu.json).
"""

import math
from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from moba_train.checkpoint.rank_group import RankGroup
from moba_train.checkpoint.threads import evenly, in_threads

Shapes = dict[str, tuple[object, ...]]
"""Global shape, local shape, dtype and placements of each tensor: all that a save plan depends on."""


class PlannedWriter:
    """Writes tensors whose parts lie on many ranks. Every method is called on all ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._shapes: Shapes | None = None
        self._save_plan: SavePlan
        self._metadata: Metadata | None = None
        """DCP's index of the tensors of all ranks; on rank 0 only."""

    def plan(self, tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
        """Makes the save plan, unless the one at hand is for such tensors. `parts`: this rank's part of each tensor, or
        a copy of it. Raises SaveFailedError."""
        shapes: Shapes = {
            name: (tensor.shape, parts[name].shape, tensor.dtype, getattr(tensor, "placements", None))
            for name, tensor in tensors.items()
        }
        if all(self._ranks.gather_from_every_rank(lambda: shapes == self._shapes)):
            return
        self._shapes = None  # a failure below leaves no save plan
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=self._ranks.rank == 0)
        local_plans = self._ranks.gather_to_rank_0(self._ranks.on_every_rank(planner.create_local_plan))

        def global_plan() -> list[SavePlan]:
            if not local_plans:  # on all ranks but 0
                return []
            plans, self._metadata = planner.create_global_plan(local_plans)
            return _writer(Path(), self._ranks).prepare_global_plan(plans)

        self._save_plan = planner.finish_plan(self._ranks.scatter_from_rank_0(self._ranks.on_every_rank(global_plan)))
        self._shapes = shapes

    def write(self, folder: Path, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        """Writes into `folder`, which exists. `tensors` give the shapes and placements, `copies` the values: the parts
        of this rank, by name, on the CPU. Raises SaveFailedError."""
        self.plan(tensors, copies)
        writer = _writer(folder, self._ranks)
        own_results = self._ranks.on_every_rank(lambda: _write_own(writer, self._save_plan, _Copies(copies)))
        results = self._ranks.gather_to_rank_0(own_results)

        def finish() -> None:
            assert self._metadata is not None
            writer.finish(replace(self._metadata), results)

        self._ranks.broadcast_from_rank_0(finish)


def _write_own(writer: dcp.FileSystemWriter, plan: SavePlan, values: "_Copies") -> list[WriteResult]:
    """Writes this rank's parts of the tensors, into one file for each thread: `__0_0.distcp`, or `__0_0_0.distcp`,
    `__0_1_0.distcp` and so on."""
    plans, names, parts = [plan], plan.storage_data, evenly(plan.items, _bytes_of)
    if len(parts) > 1:
        plans = [
            replace(plan, items=part, storage_data=replace(names, prefix=f"{names.prefix}{number}_"))
            for number, part in enumerate(parts)
        ]
    written = in_threads(lambda part: writer.write_data(part, values).value(), plans, len(plans))
    return [result for results in written for result in results]


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None, "all that is saved are tensors"
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _writer(folder: Path, ranks: RankGroup) -> dcp.FileSystemWriter:
    # No copying ahead: the values are on the CPU already, and the writer would wait for the default stream of GPU 0.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(ranks.rank == 0, rank=ranks.rank, use_collectives=True)
    return writer


class _Copies(dcp.DefaultSavePlanner):
    """A planner that gives the writer the copies in place of the tensors."""

    def __init__(self, copies: dict[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]
