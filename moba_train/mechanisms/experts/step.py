"""Load of the experts in a step over all ranks, its metrics, and the update of the biases that follows from it.

The functions are those of `RegisteredFeedForward.steps`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.config.layers import layer_ids
from moba_train.config.mesh import MeshSizes
from moba_train.config.stages import Stage
from moba_train.mechanisms.experts.balance import Balance
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.mechanisms.experts.parallel import counting_groups
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.dims import ParallelDims

MOST_LOADS = 256
"""Experts of all layers up to which the metrics of every step have the load of each of them."""
LOADS_EVERY = 100
"""Steps between those that have it otherwise: the 6,144 of Qwen3-30B-A3B take 40 KB of metrics.jsonl."""
Modules = Mapping[int, Any]
"""The `MixtureOfExperts` of this rank by layer. Unnamed here, as it names this module."""


def enter(
    modules: Modules, options: MoeOptions, dims: ParallelDims, sizes: MeshSizes, stage: Stage, shard: DataShard
) -> None:
    """Begin a stage of these sizes, of whose batches this rank has `shard`."""
    place = dims.for_stage(sizes)
    balance = Balance(options, counting_groups(options, dims, place), sizes.tp, place.tp_rank, stage.micro_batch_size)
    sequence_T = torch.arange(stage.micro_batch_size).repeat_interleave(stage.seq_len)
    if shard.engine is not None:
        sequence_T = shard.engine.sequence(len(sequence_T)).shard(sequence_T, shard.engine.rank)
    balance.sequence_T = sequence_T.to(dims.world.device)
    for module in modules.values():
        module.balance = balance


def begin(modules: Modules) -> None:
    """Forget what was counted in the step before."""
    for module in modules.values():
        module.balance.forget()


@torch.no_grad()
def measure(modules: Modules, options: MoeOptions, layers: int, device: torch.device, step: int) -> dict[str, Tensor]:
    """Metrics of `step` (docs/reference/metrics.md): scalars, and for some steps the load of every expert, [E] of each
    layer; none without such a layer. Called on all ranks together, with this rank's layers; `layers`: of the whole
    model."""
    used = sorted(layer_ids(options.layers, layers))
    if not used:
        return {}
    counts_LE = torch.zeros(layers, options.experts + 2, dtype=torch.float64, device=device)
    biases_L = torch.zeros(layers, dtype=torch.float64, device=device)
    for layer, module in modules.items():
        biases_L[layer] = module.bias.abs().max()
        found = module.balance.counts(module.bias.data_ptr())
        if found is not None:
            counts_LE[layer] = found
    if dist.is_initialized():
        dist.all_reduce(counts_LE)
        dist.all_reduce(biases_L, op=dist.ReduceOp.MAX)
    for layer, module in modules.items():
        module.load_E = counts_LE[layer, : options.experts]
    loads_LE, rest_Ln = counts_LE[used].split([options.experts, 2], dim=1)
    tokens_L = rest_Ln[:, 1].clamp(min=1)
    shares_LE = loads_LE / loads_LE.sum(1, keepdim=True).clamp(min=1)
    entropy_L = -torch.special.xlogy(shares_LE, shares_LE).sum(1) / math.log(options.experts)
    relative_LE = shares_LE * options.experts
    metrics = {
        "expert_load_max": relative_LE.max(),
        "expert_load_min": relative_LE.min(),
        "expert_load_entropy": entropy_L.mean(),
        "router_entropy": (rest_Ln[:, 0] / tokens_L).mean(),
        "expert_dropped": (options.active * rest_Ln[:, 1] - loads_LE.sum(1)).sum(),
    }
    if options.router.has_bias:
        metrics["expert_bias_max"] = biases_L.max()
    metrics |= {f"expert_load_max_layer_{layer}": row_E.max() for layer, row_E in zip(used, relative_LE, strict=True)}
    if relative_LE.numel() <= MOST_LOADS or step % LOADS_EVERY == 0:
        percent_LE = (100 * relative_LE).round()
        metrics |= {f"expert_load_layer_{layer}": row_E for layer, row_E in zip(used, percent_LE, strict=True)}
    return {name: value.float() for name, value in metrics.items()}


@torch.no_grad()
def update(modules: Modules, options: MoeOptions) -> None:
    """Move the bias of each expert up if its load in the step was below the mean, and down if it was above
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). All ranks have the same load, so all get the same biases. Those of
    routers that are not trained stay as they are."""
    for module in modules.values():
        if options.router.has_bias and module.router.weight.requires_grad:
            load_E = module.load_E
            module.bias += options.router.bias_update * (load_E.mean() - load_E).sign().to(module.bias.dtype)


def details(modules: Modules) -> dict[str, Any]:
    """Load of every expert in the step, over all ranks, and the biases, by layer of this rank; for spike dumps."""
    return {
        str(layer): {"load": module.load_E.long().tolist(), "bias": module.bias.tolist()}
        for layer, module in modules.items()
    }
