"""The dump of a step at a spike, with what is needed to find its cause: `run_dir/spikes/step_00001234.json`.

    step, stage, tokens, message, level, action, loss, grad_norm, lr, spike_z_loss, spike_z_grad
    gradient_norms  of the whole step, before clipping: {layers: [{layer, kind, norm}], kinds: {full, moba, ...},
                    embedding, norm, output}
    ranks           one entry for each rank, about the tokens that are its own:
      loss            mean over its loss tokens by their weights, as the step itself found it; null without any
      repeated_loss   mean loss in the forward pass that is made for the dump. The batch and the weights are those of
                      the step: where the two differ by more than rounding, suspect the machine, not the data
      loss_tokens     how many there are
      max_lse         by layer, the largest log-sum-exp of a query's attention scores: at least its largest logit, at
                      most that + ln(keys); null for kinds that do not attend through the engine
      gate            by layer, routing statistics {selected, load_imbalance, entropy, first_block_share, distance}:
                      attention/moba/statistics.py; null where nothing was selected: full attention, or every block.
                      They cover what this rank selected: under context parallelism for its own queries, with ulysses
                      and hierarchical for those of all ranks or of its node, with its own heads
      micro_batches   [[{source, document, start, stop, loss, loss_tokens}]]: the document parts in order; loss
                      is the mean over their loss tokens on this rank, from the repeated pass

Losses that are not finite are NaN or Infinity, as Python's json writes and reads them.
"""

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moba_train.attention.kind import WrappedEngine
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.observer import SelectionRecorder, mean_statistics
from moba_train.attention.operators import OperatorEngine
from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.data.batch import Batch
from moba_train.model.transformer import Engine, Transformer
from moba_train.optim.gradients import norms_by_module
from moba_train.parallel.forward import token_losses
from moba_train.parallel.stage import DataShard
from moba_train.parallel.world import broadcast

logger = logging.getLogger(__name__)


def dump_folder(run_dir: Path) -> Path:
    """Folder of a run for its dumps; their names sort like their steps."""
    return run_dir / "spikes"


class Dump(NamedTuple):
    """What the dump of a step holds for the log."""

    ranks: list[dict[str, Any]]
    """The entry of every rank."""
    gate: dict[str, float]
    """`gate_load_imbalance` and so on: means over the selections of all layers and ranks; empty without any."""
    path: Path | None = None
    """Its file; None if it could not be written."""


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
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, _rank_entry(model, data_shard, batches, loss_sum))
    path = dump_folder(run_dir) / f"step_{head['step']:08d}.json"
    written = broadcast(dist.get_rank() == 0 and _write(path, {**head, "gradient_norms": norms, "ranks": ranks}))
    gate = mean_statistics(layer for rank in ranks for layer in rank["gate"])
    return Dump(
        ranks,
        {f"gate_{name}": value for name, value in (gate or {}).items() if name != "selected"},
        path if written else None,
    )


def _write(path: Path, dump: dict[str, Any]) -> bool:
    """Write the file completely or not at all; whether it could be written."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_text(json.dumps(dump, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        logger.warning("the dump of a spike could not be written: %s", error)
        return False
    return True


def _gradient_norms(model: Transformer, kinds: Sequence[str]) -> dict[str, Any]:
    norms, others = norms_by_module(model)
    by_kind = {
        kind: math.hypot(*[norm for norm, other in zip(norms, kinds, strict=True) if other == kind])
        for kind in dict.fromkeys(kinds)
    }
    layers = [{"layer": i, "kind": kind, "norm": norm} for i, (kind, norm) in enumerate(zip(kinds, norms, strict=True))]
    return {"layers": layers, "kinds": by_kind, **others}


@torch.no_grad()
def _rank_entry(model: Transformer, data_shard: DataShard, batches: list[Batch], loss_sum: Tensor) -> dict[str, Any]:
    """This rank's entry in `ranks`, with a forward pass over its batches."""
    repeated = 0.0
    micro_batches = []
    with _observed_layers(model, data_shard.engine or LOCAL_ENGINE) as layers:
        for batch in batches:
            losses_n = token_losses(model, batch)
            repeated += (losses_n * batch.loss_weight).sum().item()
            micro_batches.append(_part_losses(batch, data_shard, losses_n))
    if isinstance(model, FSDPModule):
        model.reshard()  # the next forward pass would use the weights that were gathered for this one
    weight = sum(batch.loss_weight_sum for batch in batches)
    return {
        "loss": loss_sum.item() / weight if weight else None,
        "repeated_loss": repeated / weight if weight else None,
        "loss_tokens": sum(batch.loss_tokens for batch in batches),
        "max_lse": [value if math.isfinite(value := layer.max_lse.item()) else None for layer in layers],
        "gate": [mean_statistics(layer.recorder.statistics) for layer in layers],
        "micro_batches": micro_batches,
    }


@dataclass
class _LayerObservation:
    """The largest log-sum-exp and the selections of one layer's attention."""

    max_lse: Tensor
    recorder: SelectionRecorder


@contextmanager
def _observed_layers(model: Transformer, engine: OperatorEngine) -> Iterator[list[_LayerObservation]]:
    """Observe the attention of every layer inside the context, where compiled blocks run uncompiled.

    `engine` runs the attention of all layers.
    """
    device = next(model.parameters()).device
    nothing = torch.tensor(-torch.inf, device=device)
    layers = [_LayerObservation(nothing, SelectionRecorder()) for _ in range(model.config.layers)]

    def observed(layer: _LayerObservation) -> Engine:
        def run(q: Tensor, k: Tensor, v: Tensor, attention: LocalAttention, layout: Layout) -> tuple[Tensor, Tensor]:
            with engine.observe(layer.recorder):
                out, lse_HT = engine(q, k, v, attention, layout)
            layer.max_lse = torch.maximum(layer.max_lse, lse_HT.max())
            return out, lse_HT

        return WrappedEngine(engine, run)

    model.set_engines([observed(layer) for layer in layers])
    try:
        with torch.compiler.set_stance("force_eager"):
            yield layers
    finally:
        model.set_engines([engine] * len(layers))


def _part_losses(batch: Batch, data_shard: DataShard, losses_n: Tensor) -> list[dict[str, Any]]:
    """The document parts of a micro-batch, with the mean of their `losses_n`, which are those of `loss_index`."""
    tokens_T = torch.arange(batch.layout.total, device=losses_n.device)
    if (engine := data_shard.engine) is not None:
        tokens_T = engine.sequence(batch.layout.total).shard(tokens_T, engine.rank)
    document_n = batch.layout.documents(tokens_T[batch.loss_index])
    documents = batch.layout.cu_seqlens.numel() - 1
    sums, weights, counts = (
        torch.zeros(documents, device=losses_n.device).index_add_(0, document_n, values_n).tolist()
        for values_n in (losses_n * batch.loss_weight, batch.loss_weight, (batch.loss_weight != 0).float())
    )
    return [
        {**part._asdict(), "loss": sums[i] / weights[i] if weights[i] else None, "loss_tokens": int(counts[i])}
        for part, i in zip(batch.parts, batch.part_documents, strict=True)
    ]
