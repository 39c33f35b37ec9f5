"""The dump of a step at a spike, with the facts to find its cause: `run_dir/spikes/step_00001234.json`.

    step, stage, tokens, message, level, action, loss, grad_norm, lr, spike_z_loss, spike_z_grad
    gradient_norms  of the whole step, before clipping: {layers: [{layer, kind, norm}], kinds: {full, moba, ...},
                    embedding, norm, output}
    attention       by layer, the statistics of all ranks together
    feed_forwards   for experts, load of each in the step over all ranks, and bias, by layer of rank 0's part
    ranks           one entry for each rank, about the tokens that are its own:
      loss            mean over its loss tokens by their weights, as found in the step itself; null without any
      repeated_loss   mean loss in the forward pass that is made for the dump. The batch and the weights are those of
                      the step: if the two differ by more than rounding, suspect the machine, not the data
      loss_tokens     their number
      attention       by layer, statistics of its kind by name (attention/statistics.py), as seen by this rank: under
                      context parallelism for its own queries, with ulysses and hierarchical for those of all ranks or
                      of its node, with its own heads; {} for layers of other ranks of a pipeline
      micro_batches   [[{source, document, start, stop, loss, loss_tokens}]]: the document parts in order; loss
                      is the mean over their loss tokens on this rank, from the repeated pass

Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity" (strict_json.py).
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.observer import StatisticsObserver
from moba_train.attention.statistics import Statistics, joined
from moba_train.data.batch import Batch
from moba_train.errors import ForeignFileError
from moba_train.model.build import observed_layers
from moba_train.model.feed_forward import each_kind
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import Gradients
from moba_train.output_files import make_folder, write_atomically
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import token_losses
from moba_train.parallel.world import broadcast, gather_over_ranks
from moba_train.strict_json import to_json

logger = logging.getLogger(__name__)


def dump_folder(run_dir: Path) -> Path:
    """Folder of a run for its dumps; their names sort like their steps."""
    return run_dir / "spikes"


GATE = ("load_imbalance", "entropy", "first_block_share", "distance")
"""Statistics of which the log has means."""


class Dump(NamedTuple):
    """Contents of a step's dump for the log."""

    ranks: list[dict[str, Any]]
    """Entry of every rank."""
    gate: dict[str, float]
    """`gate_load_imbalance` and so on (`GATE`): means over the selections of all layers and ranks."""
    path: Path | None = None
    """File of the dump; None if it could not be written."""


def write_dump(
    run_dir: Path,
    head: dict[str, Any],
    *,
    model: Transformer,
    kinds: Sequence[str],
    data_shard: DataShard,
    batches: list[Batch],
    loss_sum: Tensor,
) -> Dump:
    """Dump a step before it is applied; rank 0 writes the file, which begins with the entries of `head`.

    Called on all ranks together, with the step's gradients in place and not clipped. `kinds`: attention kind of each
    layer; `batches`: this rank's part of the step; `loss_sum`: sum of its weighted token losses, a scalar. Costs a
    forward pass and many reads of the device. A file that cannot be written is only a warning.
    """
    norms = _gradient_norms(model, kinds)
    ranks, by_rank = zip(*gather_over_ranks(_rank_entry(model, data_shard, batches, loss_sum)), strict=True)
    layers = [joined(layer) for layer in zip(*by_rank, strict=True)]
    whole = {**head, "gradient_norms": norms, "attention": [layer.values for layer in layers], "ranks": ranks}
    whole |= {"feed_forwards": [steps.details(modules) for steps, _, modules in each_kind(model)]}
    path = dump_folder(run_dir) / f"step_{head['step']:08d}.json"
    written = broadcast(dist.get_rank() == 0 and _write(path, whole))
    found = joined(layers).values
    return Dump(list(ranks), {f"gate_{name}": found[name] for name in GATE if name in found}, path if written else None)


def _write(path: Path, dump: dict[str, Any]) -> bool:
    """Write the file completely or not at all. Returns True if it could be written."""
    try:
        make_folder(path.parent)
        write_atomically(path, to_json(dump, indent=1))
    except (OSError, ForeignFileError) as error:
        logger.warning("the dump of a spike could not be written: %s", error)
        return False
    return True


def _gradient_norms(model: Transformer, kinds: Sequence[str]) -> dict[str, Any]:
    norms, others = Gradients(model).norms_by_module()
    by_kind = {
        kind: math.hypot(*[norm for norm, other in zip(norms, kinds, strict=True) if other == kind])
        for kind in dict.fromkeys(kinds)
    }
    layers = [{"layer": i, "kind": kind, "norm": norm} for i, (kind, norm) in enumerate(zip(kinds, norms, strict=True))]
    return {"layers": layers, "kinds": by_kind, **others}


@torch.no_grad()
def _rank_entry(
    model: Transformer, data_shard: DataShard, batches: list[Batch], loss_sum: Tensor
) -> tuple[dict[str, Any], list[Statistics]]:
    """This rank's entry in `ranks`, from a forward pass over its batches, and the statistics of each layer."""
    engine = data_shard.engine or LOCAL_ENGINE
    repeated = 0.0
    micro_batches = []
    layers = [StatisticsObserver() for _ in range(model.config.layers)]
    # A separate pass: observing every step would cost each of them reads of the device.
    with observed_layers(model, engine, layers):
        for batch in batches:
            losses_n = token_losses(model, batch)
            repeated += (losses_n * batch.loss_weight).sum().item()
            micro_batches.append(_part_losses(batch, data_shard, losses_n))
    if isinstance(model, FSDPModule):
        model.reshard()  # the next forward pass would use the weights that were gathered for this one
    weight = sum(batch.loss_weight_sum for batch in batches)
    statistics = [layer.statistics for layer in layers]
    entry = {
        "loss": loss_sum.item() / weight if weight else None,
        "repeated_loss": repeated / weight if weight else None,
        "loss_tokens": sum(batch.loss_tokens for batch in batches),
        "attention": [layer.values for layer in statistics],
        "micro_batches": micro_batches,
    }
    return entry, statistics


def _part_losses(batch: Batch, data_shard: DataShard, losses_n: Tensor) -> list[dict[str, Any]]:
    """Document parts of a micro-batch, each with the mean of its `losses_n`, which are those of `loss_index`; without
    losses on a rank of a pipeline that does not compute them."""
    tokens_T = torch.arange(batch.layout.total, device=losses_n.device)
    if (engine := data_shard.engine) is not None:
        tokens_T = engine.sequence(batch.layout.total).shard(tokens_T, engine.rank)
    document_n = batch.layout.documents(tokens_T[batch.loss_index])
    weight_n = batch.loss_weight if data_shard.computes_loss else torch.zeros_like(batch.loss_weight)
    documents = batch.layout.cu_seqlens.numel() - 1
    sums, weights, counts = (
        torch.zeros(documents, device=losses_n.device).index_add_(0, document_n, values_n).tolist()
        for values_n in (losses_n * weight_n, weight_n, (weight_n != 0).float())
    )
    return [
        {**part._asdict(), "loss": sums[i] / weights[i] if weights[i] else None, "loss_tokens": int(counts[i])}
        for part, i in zip(batch.parts, batch.part_documents, strict=True)
    ]
