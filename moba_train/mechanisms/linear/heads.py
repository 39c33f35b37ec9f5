"""Heads of a kind with parameters on the ranks of tensor parallelism: each computes some heads on all rows.

The style divides the parameters; `heads_of_rank` gives a kind's `mix` plain tensors of this rank, so that it does not
know of the others.

Shape suffixes: T rows, D hidden size.
"""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from moba_train.attention.kind import LayerInput

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class DividedHeads(ParallelStyle):
    """Style for a kind's parameters: their rows are divided like the heads, of `o_proj` the columns; `shared` ones are
    on all ranks."""

    def __init__(self, *shared: str) -> None:
        super().__init__()
        self._shared = shared

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, weight in list(module.named_parameters()):
            inside, _, last = name.rpartition(".")
            place: Placement = Shard(int(inside == "o_proj"))
            if name.endswith(self._shared):
                place = Replicate()
            part = nn.Parameter(distribute_tensor(weight, device_mesh, [place], src_data_rank=None))
            module.get_submodule(inside).register_parameter(last, part)
        return module


def heads_of_rank(layer: LayerInput, parameters: AnyModule) -> tuple[LayerInput, AnyModule]:
    """The layer's input and parameters as plain tensors with this rank's heads; without tensor parallelism as given."""
    if not isinstance(layer.x_TD, DTensor):
        return layer, parameters
    return layer._replace(x_TD=_of_rank(layer.x_TD)), _with_parts(parameters)


def sum_over_heads(update_TD: Tensor, x_TD: Tensor) -> Tensor:
    """The sum over the ranks' heads, this rank's rows of it; without tensor parallelism as given. x_TD: as the layer
    was given it."""
    if not isinstance(x_TD, DTensor):
        return update_TD
    summands = DTensor.from_local(update_TD, x_TD.device_mesh, [Partial()], run_check=False)
    return summands.redistribute(placements=[Shard(0)]).to_local()


@torch.compiler.disable  # modules cannot be copied in compiled code
def _with_parts(module: AnyModule) -> AnyModule:
    """A copy of the module whose parameters are this rank's parts."""
    # A copy, not torch.func.functional_call: what is recomputed in the backward pass still finds the parts.
    made = copy.copy(module)
    made._parameters = {name: None if x is None else _of_rank(x) for name, x in module._parameters.items()}  # type: ignore[misc]  # parts are no leaves
    made._modules = {name: None if inner is None else _with_parts(inner) for name, inner in module._modules.items()}
    return made


def _of_rank(x: Tensor) -> Tensor:
    """This rank's part; of what all ranks have, each gives a summand of the gradient."""
    assert isinstance(x, DTensor)
    return x.to_local(grad_placements=[Partial() if place.is_replicate() else place for place in x.placements])
