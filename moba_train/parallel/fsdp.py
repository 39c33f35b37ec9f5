"""The model of a run on this rank, sharded by FSDP2: float32 master weights in shards, gathered in the compute dtype,
in which the base of adapters also stays; gradients are reduced in float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import ParallelConfig
from moba_train.config.precision import PrecisionConfig
from moba_train.model.block import Block
from moba_train.model.build import build_model, initialize_weights
from moba_train.model.feed_forward import registered_modules
from moba_train.model.loss import CompiledChunkLoss
from moba_train.model.spec import ModelSpec, kind_parameters
from moba_train.model.transformer import Transformer
from moba_train.parallel.activations import wrap_blocks
from moba_train.parallel.dims import SHARD, ParallelDims, coordinates
from moba_train.parallel.float8 import compile_for_float8, convert_linears
from moba_train.parallel.largest_lse import LargestLse
from moba_train.parallel.pipeline.model import PipelineModel, PipelinePlace, model_parts
from moba_train.parallel.tensor import apply_tensor_parallel, overlap_transfers
from moba_train.parallel.transfers import (
    CopyEngineGather,
    CopyEngineReduceScatter,
    gathered_bytes,
)
from moba_train.torch_private import dynamo_config, move_hooks


@dataclass(frozen=True)
class Computation:
    """The way in which the layers compute, in all stages of a run."""

    dtype: torch.dtype
    """Dtype of matrix products and activations; weights, gradients and optimizer state are float32."""
    precision: PrecisionConfig
    """Precision of linear layers, which may multiply in FP8."""
    compiled: bool
    """True: by torch.compile, block by block."""

    @property
    def width(self) -> int:
        """Bytes of one element in `dtype`."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class ModelSetup:
    """The model of a run, the division of its layers over a pipeline, and the way in which it computes."""

    spec: ModelSpec
    parts: tuple[int, ...]
    """Number of layers in each part of the model; a single part without pipeline parallelism."""
    computation: Computation

    @property
    def shape(self) -> ModelConfig:
        """The shape of the Transformer."""
        return self.spec.config


COMPILED_FORMS = 64
"""Limit of the number of times that torch compiles the blocks' code in one stage: for each attention kind and sequence
length, with gradients and without. Beyond its own limit, 8, it runs the code uncompiled, with only a warning."""

ONE_UNIT_PARAMETERS = 100_000_000
"""Most parameters of a model on one rank that is one unit of FSDP. Where there is nothing to overlap, units of one
block each only bound what is gathered at once, 0.4 GB of bf16 weights and gradients here. They cost host time: 17 % of
a step of a tiny model of 6 layers."""


def is_one_unit(parameters: int, sizes: MeshSizes) -> bool:
    """True if FSDP gathers a model with this number of parameters, and reduces its gradients, at once instead of block
    by block."""
    return sizes.ranks == 1 and parameters <= ONE_UNIT_PARAMETERS


def has_head_unit(tied: bool, sizes: MeshSizes) -> bool:
    """True if the last norm and the output projection are a unit of FSDP of a model that is not one unit itself; with
    tied embeddings the projection belongs to the embedding."""
    return not tied and sizes.pp == 1


def compute_dtype(precision: PrecisionConfig, device: str | None) -> torch.dtype:
    """The dtype of the layers' computation: `precision.compute`, where auto is bf16 on a GPU and float32 on a CPU.

    device: "cuda" or "cpu"; None: not known, taken for a GPU.
    """
    is_bf16 = device != "cpu" if precision.compute == "auto" else precision.compute == "bf16"
    return torch.bfloat16 if is_bf16 else torch.float32


def sharded_model(setup: ModelSetup, parallel: ParallelConfig, dims: ParallelDims, seed: int) -> Transformer:
    """The model with its initial weights, which `seed` determines, sharded over the ranks of `dims`.

    Of `parallel` it reads how weights and gradients travel, and the schedule of a pipeline; the sizes are those of
    `dims`.

    Each block is a unit of FSDP, and so are the last norm and the output projection together; a small model on one rank
    is one unit (`is_one_unit`).

    Its blocks keep all activations until `set_activations` (parallel/activations.py) says otherwise.

    No rank ever holds the whole model: it is built on the meta device, sharded, and filled one parameter at a time.
    Gradients are summed over ranks, never averaged, because the loss is already divided by the global number of loss
    tokens.
    """
    computation = setup.computation
    device = dims.world.device
    compiled = computation.compiled
    with torch.device("meta"):
        model = build_model(setup.spec) if dims.sizes.pp == 1 else _pipeline_model(setup, parallel, dims)
    if compiled:
        limits = dynamo_config()
        limits.recompile_limit = max(limits.recompile_limit, COMPILED_FORMS)
        if device.type == "cuda":  # a CPU's short runs would take longer to compile it than they gain
            model.chunk_loss = CompiledChunkLoss()
    if computation.precision.linear == "fp8":
        convert_linears(model, computation.precision)
        if compiled:
            compile_for_float8(computation.precision)
    wrap_blocks(model, compiled)
    if dims.tp_mesh is not None:
        apply_tensor_parallel(model, dims.tp_mesh)
        if parallel.tp_overlap:
            overlap_transfers(dims.tp_mesh)
    _shard(model, computation, parallel, dims)
    # Behind sharding, so that only this rank's parts are ever allocated.
    model.to_empty(device=device)
    initialize_weights(model, seed)
    if model.adapters is not None:
        model.adapters.dtype = computation.dtype
    wide = torch.promote_types(computation.dtype, torch.float32)
    model.largest_lse = LargestLse(model, dims.sizes.tp, coordinates(dims.sizes, dims.world.rank).tp, wide, device)
    return model


def _shard(model: Transformer, computation: Computation, parallel: ParallelConfig, dims: ParallelDims) -> None:
    """Make the units of FSDP, in place, with the transfers that `parallel` asks for."""
    # Inputs are not cast, so that cos and sin stay float32 when the layers compute in bf16.
    dtype = computation.dtype
    # Reduced in float32 (float64 for float64): sums over many ranks in bf16 lose what small gradients add.
    wide = torch.promote_types(dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False)
    units = _units(model, dims.sizes)
    gather: CopyEngineGather | None = None
    reduce_scatter: CopyEngineReduceScatter | None = None
    if dims.sizes.shards > 1 and parallel.fsdp_copy_engines and dims.world.device.type == "cuda":
        gradients = wide if dims.sizes.pp > 1 else dtype  # a pipeline adds up those of its micro-batches first
        gather, reduce_scatter = _copy_engine_transfers(model, dims, dtype, gradients, computation.compiled)

    def shard(block: nn.Module | None, modules: list[nn.Module], mesh: DeviceMesh) -> None:
        fully_shard(modules, mesh=mesh, mp_policy=policy)
        if block is not None:
            move_hooks(modules[0], block)
        unit: Any = modules[0]
        # By a profile of 16 layers at 8K on one H200 that pass took 8.6 of 491 ms
        # (benchmarks/results/training-profile-8b-16-layers-h200.json).
        if mesh.size() > 1:  # one rank would divide by 1, a pass over all gradients
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo can only sum
        if reduce_scatter is not None and mesh == dims.weight_mesh:
            unit.set_custom_reduce_scatter(reduce_scatter)
        if gather is not None and isinstance(modules[0], Block):  # the ends would need far larger buffers
            unit.set_custom_all_gather(gather)

    for layer, module in registered_modules(model).items():
        module.parallel.shard(module, dims, partial(shard, model.blocks.get_submodule(str(layer))))
    for modules in units:
        shard(None, modules, dims.weight_mesh)
    # FSDP gathers weights in `forward` only, and these methods use weights of the model itself.
    for method in ("loss", "token_losses") + (("run_part",) if isinstance(model, PipelineModel) else ()):
        register_fsdp_forward_method(model, method)


def _units(model: Transformer, sizes: MeshSizes) -> list[list[nn.Module]]:
    """Modules that FSDP gathers and reduces together, the whole model last, which has what no other unit has.

    The last norm and the output projection are a unit, so that its transfers are hidden behind the blocks. A pipeline
    has none: its weights and gradients stay for the whole step.
    """
    if is_one_unit(sum(weight.numel() for weight in model.parameters()), sizes):
        return [[model]]
    units: list[list[nn.Module]] = [[block] for block in model.blocks]
    if has_head_unit(model.config.tie_embeddings, sizes):
        assert model.output is not None
        # Its gather and its reduction are hidden behind the blocks: about 1 % of the 8B's step at 8K
        # (benchmarks/LOG.md, "8K tokens").
        units.append([model.norm, model.output])
    return [*units, [model]]


def _copy_engine_transfers(
    model: Transformer, dims: ParallelDims, dtype: torch.dtype, gradients: torch.dtype, compiled: bool
) -> tuple[CopyEngineGather, CopyEngineReduceScatter]:
    """The gather of all blocks, which are not sharded yet, and the reduction of all gradients. A collective."""
    group, device, timeout = dims.mesh.get_group(SHARD), dims.world.device, dims.world.timeout
    # Blocks share the buffers, so they have the size of the largest.
    size = max(gathered_bytes(block, dims.sizes.shards, dtype) for block in model.blocks)
    reduction = CopyEngineReduceScatter(group, device, gradients, timeout, compiled=compiled)
    return CopyEngineGather(group, device, size, timeout), reduction


def _pipeline_model(setup: ModelSetup, parallel: ParallelConfig, dims: ParallelDims) -> PipelineModel:
    """This rank's parts of the model."""
    parts = tuple(model_parts(setup.parts))
    place = PipelinePlace(dims.pipeline_group, parts, parallel.pp_schedule, setup.computation.dtype, dims.sizes.tp)
    return PipelineModel(setup.shape, kind_parameters(setup.shape, setup.spec.kinds), place)
