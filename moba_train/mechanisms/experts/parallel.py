"""Experts on ranks: tensor parallelism divides the columns of each expert, expert parallelism the experts.

Expert parallelism (`parallel.ep`) is over ranks of dp_shard x cp, whose tokens differ anyway. FSDP shards the experts
of a rank over the ranks that have the same ones, and sums their gradients over those alone, because the tokens of all
others have come to them. All other weights are sharded and summed over dp_shard x cp as without experts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from moba_train.config.mesh import allowed_divisors
from moba_train.config.schema import RunConfig
from moba_train.mechanisms.experts.exchange import named
from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.parallel.dims import ParallelDims, StageDims
from moba_train.torch_private import dynamo_config

_COLUMNS = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}
"""Dimension of each stack of weights that is the width of an expert."""


class ExpertsParallel(ParallelStyle):
    """Style for a layer of experts: all rows of the tp group come in, each rank computes with some columns of every
    expert, and the sums over the ranks go out by rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.tp = device_mesh.size()  # type: ignore[assignment]  # a number of MixtureOfExperts
        module.tp_rank = device_mesh.get_local_rank()  # type: ignore[assignment]  # the same
        assert isinstance(module.router, nn.Module)
        _distribute(module.router, device_mesh, {"weight": [Replicate()]})
        if isinstance(module.shared, nn.Module):
            for name, dimension in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
                _distribute(module.shared.get_submodule(name), device_mesh, {"weight": [Shard(dimension)]})
        if isinstance(module.shared_gate, nn.Module):
            _distribute(module.shared_gate, device_mesh, {"weight": [Replicate()]})

        def all_rows(_module: nn.Module, inputs: tuple[DTensor]) -> tuple[Tensor]:
            (x_TD,) = inputs
            whole_TD = x_TD.redistribute(placements=[Replicate()])
            return (whole_TD.to_local(grad_placements=[Partial()]),)

        def own_rows(_module: nn.Module, _inputs: Any, result: tuple[Tensor, Tensor | None]) -> Any:
            update_TD, auxiliary_T = result
            summands = DTensor.from_local(update_TD, device_mesh, [Partial()], run_check=False)
            return summands.redistribute(placements=[Shard(0)]).to_local(), auxiliary_T

        module.register_forward_pre_hook(all_rows)
        module.register_forward_hook(own_rows)
        return module


def style() -> ExpertsParallel:
    """Style by which torch divides the layer's columns."""
    return ExpertsParallel()


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: dict[str, list[Placement]]) -> None:
    for name, placed in placements.items():
        weight = module.get_parameter(name)
        part = distribute_tensor(weight, mesh, placed, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))


def shard(module: Any, dims: ParallelDims, unit: Callable[..., None]) -> None:
    """Divide the experts over the ranks of an ep group and the columns over those of a tp group, and make a unit of
    FSDP of divided experts, by `unit`."""
    names = [name for name, size in (("ep", dims.ep), ("tp", dims.sizes.tp)) if size > 1]
    if not names:
        return
    root = dims.expert_mesh if dims.ep > 1 else dims.mesh
    mesh = root[tuple(names)]
    for name, columns in _COLUMNS.items():
        placed: list[Placement] = [Shard(0) if dimension == "ep" else Shard(columns) for dimension in names]
        stack = module.experts.get_submodule(name)
        _distribute(stack, mesh, {parameter: placed for parameter, _ in stack.named_parameters()})
    if dims.ep > 1:
        module.ep_group = named(dims.expert_mesh.get_group("ep"))
        # Else torch.compile stops at the number of rows that arrive, and runs a recomputed block uncompiled.
        dynamo_config().capture_dynamic_output_shape_ops = True
        copies = ("dp_replicate",) if dims.sizes.dp_replicate > 1 else ()
        unit([module.experts], dims.expert_mesh[(*copies, "experts_shard")])


def counting_groups(options: MoeOptions, dims: ParallelDims, stage: StageDims) -> list[dist.ProcessGroup]:
    """Groups over which the load of a micro-batch is summed for the auxiliary loss, in a stage."""
    if options.router.aux_loss_over == "batch":
        return [dims.layers_group] if dims.layers_group.size() > 1 else []
    tp_group = dims.tp_mesh.get_group() if dims.tp_mesh is not None else None
    return [group for group in (stage.cp_group, tp_group) if group is not None]


def problems(options: MoeOptions, recipe: RunConfig, ranks: int | None, device: str | None) -> Iterator[str]:
    """Reasons why a recipe cannot have experts. ranks: of dp_shard x cp; device: "cuda" or "cpu"; None: not known."""
    compute = recipe.precision.compute
    if recipe.compile and (compute == "fp32" or (compute == "auto" and device == "cpu")):
        yield (
            ".compile: given true with experts in float32, whose grouped products torch.compile cannot trace; set "
            "false, or precision.compute: bf16"
        )
    parallel = recipe.parallel
    ep = parallel.ep
    if options.experts % ep:
        yield f".parallel.ep: given {ep}, which does not divide model.moe.experts {options.experts}; " + (
            allowed_divisors(options.experts)
        )
    if options.intermediate_size % parallel.tp:
        yield (
            f".parallel.tp: given {parallel.tp}, which does not divide model.moe.intermediate_size "
            f"{options.intermediate_size}; {allowed_divisors(options.intermediate_size)}"
        )
    if ranks is not None and ranks % ep:
        yield (
            f".parallel.ep: given {ep}, which does not divide the {ranks} ranks of dp_shard x cp; "
            f"{allowed_divisors(ranks)}"
        )
    if ep > 1 and parallel.fsdp_copy_engines:
        yield f".parallel.fsdp_copy_engines: given true with parallel.ep: {ep}; set false, or ep to 1"
    if parallel.pp > 1 and parallel.pp_schedule == "zero_bubble" and torch.__version__ < "2.12":
        yield (
            f".parallel.pp_schedule: given 'zero_bubble' with experts, whose backward passes torch {torch.__version__} "
            "cannot take apart; set 1f1b or interleaved_1f1b, or install torch 2.13"
        )
    if options.bias and parallel.tp > 1:
        yield f".parallel.tp: given {parallel.tp} with model.moe.bias: true, whose biases it cannot divide; set 1"
    if recipe.optim.kind == "muon" and parallel.tp > 1:
        yield (
            f".optim.kind: given 'muon' with experts and parallel.tp: {parallel.tp}, which divides each expert's "
            "matrices; set adamw, or tp to 1"
        )
    columns = options.intermediate_size // parallel.tp
    is_16_bit = compute == "bf16" or (compute == "auto" and device == "cuda")
    if is_16_bit and (columns % 8 or recipe.model.hidden_size % 8):
        yield (
            f"intermediate_size: given {options.intermediate_size} (by parallel.tp {parallel.tp}) with model."
            f"hidden_size {recipe.model.hidden_size}; allowed: multiples of 8, which grouped products in 16 bits need"
        )
