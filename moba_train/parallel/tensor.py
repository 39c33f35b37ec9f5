"""Tensor parallelism with sequence parallelism between the layers, over the ranks of a node.

As in Megatron-LM (Korthikanti et al. 2022, arXiv:2205.05198), with torch's parallel styles. Between attention and
feed-forward each of the tp ranks holds T/tp consecutive rows of a sequence's T (of its shard's, under context
parallelism). Attention and feed-forward all-gather the rows, compute with a part of the heads or columns, and
reduce-scatter their outputs. The embedding is sharded by vocabulary. A rank computes the loss of its own rows with the
gathered output weight, so ranks differ in their loss tokens as they do under context parallelism.

Attention gets all rows of some heads and does not know about tensor parallelism.
"""

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from moba_train.model.block import CenteredRMSNorm, Sink
from moba_train.model.feed_forward import registered_modules
from moba_train.model.part import own_layers
from moba_train.model.transformer import Transformer
from moba_train.torch_private import pipeline_transfers_with_products, symmetric_memory


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Shards the parameters and the computation of `model` over the ranks of `mesh`, one dimension, in place.

    From then on the model is called with the tokens and positions of all rows, and with the loss of this rank's rows,
    counted from its first one. Heads, key/value heads, hidden columns, vocabulary and rows must be divisible by the
    ranks. Norm weights are replicated; their gradients are summed over the ranks.
    """
    attention: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(Shard(0), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    if model.config.qk_norm:
        all_heads = model.config.qk_norm == "all_heads"
        heads = _NormOverRanks() if all_heads else SequenceParallel(sequence_dim=1, use_local_output=True)
        attention |= {"attention.q_norm": heads, "attention.k_norm": heads}
    # Norms work on a rank's rows, not on all of them: activations between the layers shrink by tp, and an
    # all-gather and a reduce-scatter send as much as the all-reduce that they replace.
    norms: dict[str, ParallelStyle] = {}
    if model.config.norms != "post":
        attention["attention_norm"] = SequenceParallel(sequence_dim=0)
        norms["feed_forward_norm"] = SequenceParallel(sequence_dim=0)
    if model.config.norms != "pre":
        rows = SequenceParallel(sequence_dim=0, use_local_output=True)
        attention["attention_post_norm"] = norms["feed_forward_post_norm"] = rows
    feed_forward: dict[str, ParallelStyle] = {
        **norms,
        "feed_forward": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "feed_forward.gate_proj": ColwiseParallel(),
        "feed_forward.up_proj": ColwiseParallel(),
        "feed_forward.down_proj": RowwiseParallel(output_layouts=Shard(0)),
    }
    ends: dict[str, ParallelStyle] = {}
    if hasattr(model, "embedding"):
        ends["embedding"] = _VocabularyParallel()
    if hasattr(model, "norm"):
        ends["norm"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    if model.output is not None:
        ends["output"] = _ShardedRows()
    in_blocks: dict[str, ParallelStyle] = {}
    registered = registered_modules(model)
    for layer in own_layers(model):
        own = registered.get(layer)
        fed = feed_forward if own is None else {**norms, "feed_forward": own.parallel.style()}
        in_blocks |= {f"blocks.{layer}.{name}": style for name, style in {**attention, **fed}.items()}
    modules = dict(model.named_modules())
    in_blocks = {name: style for name, style in in_blocks.items() if name in modules}  # bare layers lack projections
    for name, module in modules.items():
        if name.count(".") == 3 and (style := getattr(module, "tensor_style", None)):  # an attention kind's module
            in_blocks[name] = style
        elif name.endswith(".attention.output_gate"):
            in_blocks[name] = ColwiseParallel()
        elif isinstance(module, Sink):
            in_blocks[name] = _LocalRows()
    # None: nothing is sent from rank 0, as the model is on the meta device.
    parallelize_module(model, mesh, ends | in_blocks, src_data_rank=None)
    model.gather_output_weight = _gather_weight


def overlap_transfers(mesh: DeviceMesh) -> None:
    """Lets blocks that are compiled from now on hide their transfers, as torch's asynchronous tensor parallelism does.

    torch.compile replaces an all-gather before matrix products, or a product before a reduce-scatter, by a loop over
    the ranks' parts: one part travels between the GPUs' symmetric memory while another one is multiplied. Of the eight
    transfers of a block's forward and backward pass it takes six: the two reduce-scatters of input gradients follow a
    sum of products. The products stay the same ones; on a CPU nothing changes. Multicast is left off: parts are copied
    from GPU to GPU.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # Gains 4 to 7 % of a step with tp alone and costs 28 % of one with tp 2 and cp 2: 1,280 barriers and 1,352 copies a
    # step make the hosts late (benchmarks/results/training-profile-8b-tp2-cp2-overlap-h200-x4.json; benchmarks/LOG.md,
    # "Four GPUs").
    pipeline_transfers_with_products()
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch 2.13 needs no such call, 2.11 does
        symmetric_memory().enable_symm_mem_for_group(mesh.get_group().group_name)


class _ShardedRows(ParallelStyle):
    """Style for a module with one matrix, whose rows the ranks share out; its calls stay as they are."""

    def _shard(self, _name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, weight in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard)


class _LocalRows(_ShardedRows):
    """Style for a module that returns its vector: a rank gets its own part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_rows(_module: nn.Module, vector: DTensor, _mesh: DeviceMesh) -> Any:
            return vector.to_local()

        return distribute_module(module, device_mesh, self._shard, None, own_rows)


class _NormOverRanks(_ShardedRows):
    """Style for an RMSNorm over the channels of all ranks, each of which gives and gets its own: the ranks add up their
    sums of squares, one number for each row, and in the backward pass these sums' gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        (channels,) = module.normalized_shape
        eps = module.eps
        assert eps is not None
        shift = int(isinstance(module, CenteredRMSNorm))

        def forward(x_Tc: Tensor) -> Tensor:
            weight = module.weight
            assert isinstance(weight, DTensor)
            wide = torch.promote_types(x_Tc.dtype, torch.float32)
            squares_T1 = torch.linalg.vector_norm(x_Tc, dim=-1, keepdim=True, dtype=wide).square()
            of_rank = DTensor.from_local(squares_T1, device_mesh, [Partial()], run_check=False)
            squares_T1 = of_rank.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            scale_T1 = (squares_T1 / channels + eps).rsqrt()
            return (x_Tc * scale_T1 * (shift + weight.to_local().to(wide))).to(x_Tc.dtype)

        module.forward = forward  # type: ignore[assignment, method-assign]  # distribute_module's hooks cannot replace it
        return super()._apply(module, device_mesh)


class _VocabularyParallel(_ShardedRows):
    """Style for an embedding that is sharded by vocabulary and returns this rank's rows.

    Not RowwiseParallel: it returns an asynchronous collective's tensor, and a compiled block (torch 2.13) gives such an
    input no gradient.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def all_tokens(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def own_rows(_module: nn.Module, sums: DTensor, _mesh: DeviceMesh) -> Any:
            return sums.redistribute(placements=[Shard(0)]).to_local()

        return distribute_module(module, device_mesh, self._shard, all_tokens, own_rows)


def _gather_weight(weight_VD: Tensor) -> Tensor:
    """All-gathers the output weight [V, D]. The ranks' gradients come from different rows, so they are summed."""
    assert isinstance(weight_VD, DTensor)
    return weight_VD.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
