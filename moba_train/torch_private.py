"""torch's private names: all that the package uses. Other files import them from here.

Private names change without notice. Each entry says what it was tried with (torch 2.11.0 for CUDA on an H200, torch
2.13.0 on a CPU) and what fails without it. Names that take long to import, or that some builds lack, are looked up when
they are used, so that a missing one fails alone.
"""

from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["TorchDispatchMode"]
"""Tried with torch 2.11 and 2.13. Without it: launches cannot be recorded and repeated (kernels/common/launch.py)."""

current_dispatch_mode: Callable[[], TorchDispatchMode | None] = _get_current_dispatch_mode
"""Tried with torch 2.11 and 2.13. Without it: attention cannot tell that something sees every operator, and would have
to take torch's slow operator always (attention/operators.py)."""

tensor_version: Callable[[Tensor], int] = attrgetter("_version")
"""Tried with torch 2.11 and 2.13. Without it: layers cannot share what follows from document boundaries, because an
edit of them is not seen (attention/layout.py)."""

local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
"""A DTensor's part on this rank. Tried with torch 2.11 and 2.13. Without it: `DTensor.to_local`, whose autograd
function takes longer than the norms of all gradients (optim/gradients.py)."""

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_
foreach_lerp = torch._foreach_lerp
foreach_lerp_ = torch._foreach_lerp_
"""Tried with torch 2.11 and 2.13. Without them: one launch for each parameter instead of one for all, in gradient
norms, clipping, Muon's averages and the checks of saved tensors."""

_aten = torch.ops.aten
flash_attention_forward = _aten._flash_attention_forward
flash_attention_backward = _aten._flash_attention_backward
"""FlashAttention-2 on packed documents, with the log-sum-exp of every row and results from outside in the backward
pass. Tried with torch 2.11. Without them: the package flash-attn, or plain PyTorch (kernels/varlen)."""

cpu_flash_attention = _aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Tried with torch 2.13. Without them: plain PyTorch on a CPU (kernels/varlen)."""

cudnn_attention = _aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward = _aten._scaled_dot_product_cudnn_attention_backward
"""Tried with torch 2.11. Without them: FlashAttention-2, 1.7 times as long at 32K (attention/full/kernels.py)."""

scaled_mm = _aten._scaled_mm.default
"""FP8's matrix product. Tried with torch 2.11. Without it: activations of FP8 layers cannot be kept one by one
(parallel/activations.py)."""

grouped_mm = _aten._grouped_mm.default
"""A product for each group of rows. Tried with torch 2.13. Without it: products of experts cannot be kept
(parallel/activations.py)."""

reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
"""Tried with torch 2.11 and 2.13. Without it: the sums of tensor parallelism cannot be kept for the backward pass
(parallel/activations.py)."""


def deterministic_fill() -> bool:
    """Tried with torch 2.11 and 2.13. Without it, and the two below: FlashAttention-2's fixed order of sums needs
    `torch.use_deterministic_algorithms`, which changes the compiler's settings as well (kernels/varlen)."""
    return torch._C._get_deterministic_fill_uninitialized_memory()


def set_deterministic_fill(value: bool) -> None:
    """Setter of `deterministic_fill`. Tried with torch 2.11 and 2.13. Without it: the same."""
    torch._C._set_deterministic_fill_uninitialized_memory(value)


def set_deterministic_algorithms(value: bool, *, warn_only: bool) -> None:
    """Switch of deterministic kernels alone. Tried with torch 2.11 and 2.13. Without it: the same."""
    torch._C._set_deterministic_algorithms(value, warn_only=warn_only)


def set_allocator_settings(settings: str) -> None:
    """Tried with torch 2.11 and 2.13. Without it: segments of fixed size, or PYTORCH_ALLOC_CONF set before the process
    starts (parallel/world.py)."""
    torch._C._accelerator_setAllocatorSettings(settings)


def record_memory(most_entries: int | None) -> None:
    """Begin to record allocations on this GPU, the last `most_entries` of them, or end it (None).
    Tried with torch 2.13, on a CPU only. Without it, and the one below: no memory snapshot (sinks/profile.py)."""
    torch.cuda.memory._record_memory_history(*(() if most_entries else (None,)), max_entries=most_entries or 1)


def recorded_memory() -> Any:
    """State of the allocator, and what was recorded. Tried with torch 2.13, on a CPU only. Without it: the same."""
    return torch.cuda.memory._snapshot()


def dump_flight_record(cuda: bool) -> bytes:
    """The last collectives of this rank, NCCL's or gloo's, pickled. Tried with torch 2.11 and 2.13. Without it: no
    record of a hang, unless NCCL's own timeout ends it (health/watch.py)."""
    from torch._C import _distributed_c10d

    dump: Callable[[], bytes] = getattr(_distributed_c10d, "_dump_nccl_trace" if cuda else "_dump_fr_trace")
    return dump()


def meet_agents(own: Any, agents: int, timeout_s: float) -> None:
    """Enter the barrier in which torchrun's agents wait for each other at their end; `own`: the agent's store.
    Tried with torch 2.13. Without it: launchers wait 300 s for a node that was stopped alone (launch/torchrun.py)."""
    from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
    from torch.distributed.elastic.utils import store

    store.barrier(own, agents, _TERMINAL_STATE_SYNC_ID, timeout_s)


def local_shape_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's part of a DTensor, and where it begins. Tried with torch 2.11 and 2.13. Without it: first
    weights and published ones cannot be read or drawn shard by shard (model/build.py, hf/weights.py)."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local), tuple(offset)


def move_hooks(module: nn.Module, outer: nn.Module) -> None:
    """Have the present hooks around a module's forward pass called around that of `outer`, of which it is a part:
    outside of what is compiled or recomputed there. Tried with torch 2.13. Without it: no expert parallelism with
    compiled blocks or recomputed activations."""
    for hook in module._forward_pre_hooks.values():
        outer.register_forward_pre_hook(hook, with_kwargs=True)
    for hook in module._forward_hooks.values():
        outer.register_forward_hook(hook)
    for hooks in (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks):
        hooks.clear()


def unshared_groups(model: nn.Module) -> list[Any]:
    """FSDP's groups of parameters that this rank has alone, as objects of FSDP. Tried with torch 2.11 and 2.13.
    Without it: FSDP copies such weights and gradients twice in each pass (parallel/forward.py)."""
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [unit._get_fsdp_state()._fsdp_param_group for unit in units]
    return [group for group in groups if group is not None and group.mesh_info.mesh.size() == 1]


def end_sums(group: Any, complete: bool) -> None:
    """Have a group reduce gradients again, and move those that it has added up to its parameters, or drop them, which
    takes no transfer. Tried with torch 2.11 and 2.13. Without it: the same."""
    group.reduce_grads = True
    for parameter in group.fsdp_params:
        if not parameter.all_gather_outputs:  # never used
            continue
        if not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
            parameter.param_dtype = None  # FSDP then casts a weight as it copies it, not in a pass of its own before
        found = parameter.unsharded_accumulated_grad
        found = parameter.unsharded_param.grad if found is None else found
        parameter.unsharded_accumulated_grad = parameter.unsharded_param.grad = None
        if complete and found is not None:
            found = parameter.to_sharded_dtensor(parameter._get_grad_inner_tensor(found).to(parameter.orig_dtype))
            before = parameter.sharded_param.grad
            parameter.sharded_param.grad = found if before is None else before + found


def symmetric_memory() -> ModuleType:
    """Memory of a GPU that others read. Tried with torch 2.11. Without it: neither `tp_overlap` nor transfers by copy
    engines (parallel/tensor.py, parallel/transfers.py)."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def dynamo_config() -> Any:
    """Tried with torch 2.11 and 2.13. Without it: a model whose layers differ is compiled for a few of their forms
    only, and the others run uncompiled (parallel/fsdp.py), as do blocks of experts with `ep` (experts/parallel.py)."""
    import torch._dynamo

    return torch._dynamo.config


def inductor_config() -> Any:
    """Tried with torch 2.11 and 2.13. Without it: norms in FP8 layers take ten times as long (parallel/float8.py)."""
    import torch._inductor.config

    return torch._inductor.config


def pipeline_transfers_with_products() -> None:
    """Hide tensor parallelism's transfers behind products in code that is compiled from now on. Tried with torch 2.11
    and 2.13. Without it: no `tp_overlap` (parallel/tensor.py)."""
    inductor_config()._micro_pipeline_tp = True
