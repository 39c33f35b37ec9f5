"""torch.distributed.checkpoint's `save`, planned once for all saves.

Which rank writes which part of which tensor takes most of a second of Python to agree upon when there are a thousand
tensors, more with more ranks, and meanwhile the training thread of the same process hardly gets a turn. So a plan
serves all saves of the same tensors, and of a save itself little is left but writing (docs/performance-log.md).
"""

from dataclasses import replace
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from moba_train.checkpoint.together import Together

Shapes = dict[str, tuple[object, ...]]
"""All that a plan depends on."""


class PlannedWriter:
    """Writes tensors that many ranks hold parts of. Every method is called on all ranks."""

    def __init__(self, together: Together) -> None:
        self._together = together
        self._shapes: Shapes | None = None
        self._plan: SavePlan
        self._metadata: Metadata | None = None
        """Of all ranks' tensors; on rank 0."""

    def plan(self, tensors: dict[str, Tensor], parts: dict[str, Tensor]) -> None:
        """Agree upon who writes what, unless that is known. `parts`: this rank's, or copies. Raises SaveFailedError."""
        shapes: Shapes = {
            name: (tensor.shape, parts[name].shape, tensor.dtype, getattr(tensor, "placements", None))
            for name, tensor in tensors.items()
        }
        if all(self._together.on_every_rank(lambda: shapes == self._shapes)):
            return
        self._shapes = None  # until all went well
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=self._together.rank == 0)
        wishes = self._together.to_rank_0(self._together.each(planner.create_local_plan))

        def final() -> list[SavePlan]:
            if not wishes:  # on all but rank 0
                return []
            plans, self._metadata = planner.create_global_plan(wishes)
            return _writer(Path(), self._together).prepare_global_plan(plans)

        self._plan = planner.finish_plan(self._together.of_rank_0(self._together.each(final)))
        self._shapes = shapes

    def write(self, folder: Path, tensors: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        """Write into `folder`, which exists. `tensors` are looked at for their shapes and placements only, the values
        are those of `copies`: this rank's parts, by name, on the CPU. Raises SaveFailedError."""
        self.plan(tensors, copies)
        writer, values = _writer(folder, self._together), _Copies(copies)
        written = self._together.each(lambda: writer.write_data(self._plan, values).value())
        of_all = self._together.to_rank_0(written)

        def finish() -> None:
            assert self._metadata is not None
            writer.finish(replace(self._metadata), of_all)

        self._together.from_rank_0(finish)


def _writer(folder: Path, together: Together) -> dcp.FileSystemWriter:
    # Nothing to copy ahead: it is on the CPU already, and the writer would wait for the default stream of GPU 0.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(together.rank == 0, rank=together.rank, use_collectives=True)
    return writer


class _Copies(dcp.DefaultSavePlanner):
    """Hands the copies to the writer."""

    def __init__(self, copies: dict[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index.fqn]
