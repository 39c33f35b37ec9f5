"""Expert parallelism: tokens travel to the ranks that hold their experts, and results back, by all-to-all.

Each rank of the group has an equal range of the experts, in the order of the ranks. Numbers of rows travel first, and
the host reads them: a rank may send all of its rows to one other rank, or none, and may receive none. Gradients travel
the same ways back. The rows that a rank receives are sorted by expert, then by the rank that sent them.

All of it is operators, which torch.compile keeps whole: the number of rows that arrive is a size that no compiled code
knows. A group is known to them by its name.

Shape suffixes: D hidden size, E experts, n rows of this rank, m rows that it receives.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.mechanisms.experts.products import inverse
from moba_train.parallel.activations import ALWAYS_SAVED

_groups: dict[str, dist.ProcessGroup] = {}
_works: dict[int, Any] = {}
"""Transfers under way, by the address of what arrives."""


def named(group: dist.ProcessGroup) -> str:
    """Name of a group for the functions here, which says its size: shapes depend on it."""
    name = f"{group.group_name} of {group.size()}"
    _groups[name] = group
    return name


def at_their_experts(
    x_nD: Tensor,
    weights_n1: Tensor,
    ends_E: Tensor,
    experts: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: str,
    x_TD: Tensor,
    shared: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Results [n, D] of rows that are sorted by expert, in their order, and that of `shared`, if any, which computes it
    from x while rows travel.

    weights: of the rows, [n, 1]. ends: where the rows of each of all experts end, int32 [E]. experts: computes the
    results of this rank's experts, given rows sorted by them, their weights, and where those of each end.
    """
    arriving_E, sizes = exchange_counts(ends_E, group)
    arriving_mD, weights_m1, order_m, ends = start_exchange(x_nD, weights_n1, arriving_E, sizes, group)
    other = None if shared is None else shared(after(x_TD, arriving_mD))
    detached = None if other is None else other.detach()
    y_mD = experts(finish_exchange(arriving_mD, x_nD.detach(), order_m, detached), weights_m1, ends)
    return exchange(y_mD, order_m, sizes, len(x_nD), True, group), other


def _exchange_counts(ends_E: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Numbers of rows that arrive, from each rank for each expert here, int32 [E]; and those of rows that this rank
    sends to each rank and receives from it, int64 [2, ranks] on the host, which waits for the GPU."""
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    arriving_E = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving_E, counts_E, group=_groups[group])
    sizes = torch.stack([counts_E, arriving_E]).view(2, _groups[group].size(), -1).sum(2)
    return arriving_E, sizes.cpu()


def _start_exchange(
    x_nD: Tensor, weights_n1: Tensor, arriving_E: Tensor, sizes: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [m, D] that arrive, not yet there; their weights [m, 1], sorted by expert; the order that sorts them, int64
    [m]; and where those of each expert here end, int32."""
    sent, received = sizes.tolist()
    rows = sum(received)
    # A compiled backward pass that recomputes this may need the order alone, as of frozen experts whose products are
    # kept. Such transfers, and the memory that they hold, would pile up.
    while _works:
        _works.popitem()[1].wait()
    arriving = arriving_E.view(len(received), -1)
    here = torch.arange(arriving.shape[1], device=x_nD.device)
    expert_m = here.repeat(len(received)).repeat_interleave(arriving_E, output_size=rows)
    order_m = expert_m.sort(stable=True).indices
    weights_m1 = _exchange(weights_n1, order_m, sizes, rows, False, group)
    out_mD = x_nD.new_empty(rows, x_nD.shape[1])
    work = dist.all_to_all_single(out_mD, x_nD.contiguous(), received, sent, group=_groups[group], async_op=True)
    _works[out_mD.data_ptr()] = work
    return out_mD, weights_m1, order_m, arriving.sum(0).cumsum(0).int()


def _after(x_TD: Tensor, arriving_mD: Tensor) -> Tensor:
    """A copy of x. What is computed from it begins after the transfer, which compiled code may order otherwise."""
    return x_TD.clone()


def _finish_exchange(arriving_mD: Tensor, x_nD: Tensor, order_m: Tensor, other: Tensor | None) -> Tensor:
    """The rows that have arrived, sorted by expert. x: what is sent, which compiled code may not overwrite before;
    other: what is computed meanwhile, which it would compute later otherwise."""
    work = _works.pop(arriving_mD.data_ptr(), None)
    if work is not None:
        work.wait()
    return arriving_mD.index_select(0, order_m)


def _exchange(x: Tensor, order_m: Tensor, sizes: Tensor, rows: int, back: bool, group: str) -> Tensor:
    """The `rows` rows [rows, D] that arrive, of all n rows at their experts, sorted by them; `back`: of m rows, which
    are sorted by expert, at the ranks that sent them, in their order."""
    sent, received = sizes.tolist()
    out = x.new_empty(rows, x.shape[1])
    if back:
        # No `index_copy_`, which takes three times as long: it copies each number alone.
        x_mD = x.index_select(0, inverse(order_m))
        dist.all_to_all_single(out, x_mD, sent, received, group=_groups[group])
        return out
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_groups[group])
    return out.index_select(0, order_m)


def _operator(name: str, function: Callable[..., Any], schema: str) -> Any:
    return torch.library.custom_op(f"moba_train::{name}", function, mutates_args=(), schema=schema)


exchange_counts = _operator("exchange_counts", _exchange_counts, "(Tensor ends, str group) -> (Tensor, Tensor)")
ALWAYS_SAVED.add(torch.ops.moba_train.exchange_counts.default)
start_exchange = _operator(
    "start_exchange",
    _start_exchange,
    "(Tensor x, Tensor weights, Tensor arriving, Tensor sizes, str group) -> (Tensor, Tensor, Tensor, Tensor)",
)
after = _operator("after_start", _after, "(Tensor x, Tensor arriving) -> Tensor")
finish_exchange = _operator(
    "finish_exchange", _finish_exchange, "(Tensor arriving, Tensor x, Tensor order, Tensor? other) -> Tensor"
)
exchange = _operator(
    "exchange_rows",
    _exchange,
    "(Tensor x, Tensor order, Tensor sizes, SymInt rows, bool back, str group) -> Tensor",
)


@exchange_counts.register_fake
def _(ends_E: Tensor, group: str) -> tuple[Tensor, Tensor]:
    sizes = torch.empty(2, _groups[group].size(), dtype=torch.int64, device="cpu")
    return torch.empty_like(ends_E), sizes


@start_exchange.register_fake
def _(
    x_nD: Tensor, weights_n1: Tensor, arriving_E: Tensor, sizes: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    order_m = arriving_E.new_empty(rows, dtype=torch.int64)
    ends = arriving_E.new_empty(len(arriving_E) // sizes.shape[1])
    return x_nD.new_empty(rows, x_nD.shape[1]), weights_n1.new_empty(rows, 1), order_m, ends


@after.register_fake
def _(x_TD: Tensor, arriving_mD: Tensor) -> Tensor:
    return torch.empty_like(x_TD)


@finish_exchange.register_fake
def _(arriving_mD: Tensor, x_nD: Tensor, order_m: Tensor, other: Tensor | None) -> Tensor:
    return torch.empty_like(arriving_mD)


@exchange.register_fake
def _(x: Tensor, order_m: Tensor, sizes: Tensor, rows: int, back: bool, group: str) -> Tensor:
    return x.new_empty(rows, x.shape[1])


def _save_started(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x_nD, _, _, sizes, group = inputs
    ctx.save_for_backward(output[2], sizes)
    ctx.arguments = x_nD.shape[0], True, group


def _start_backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
    further = *ctx.saved_tensors, *ctx.arguments  # once: a recomputed block unpacks them no second time
    rows_nD, weights_n1 = (exchange(gradient, *further) for gradient in gradients[:2])
    return rows_nD, weights_n1, None, None, None


def _save_exchanged(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, order_m, sizes, _, back, group = inputs
    ctx.save_for_backward(order_m, sizes)
    ctx.arguments = x.shape[0], not back, group  # len() would have to know the number of rows


def _exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return exchange(gradient, *ctx.saved_tensors, *ctx.arguments), None, None, None, None, None


after.register_autograd(lambda _, gradient_TD: (gradient_TD, None))
start_exchange.register_autograd(_start_backward, setup_context=_save_started)
# The gradient of what arrives stays sorted by expert: `_start_backward` restores the order.
finish_exchange.register_autograd(lambda _, gradient_mD: (gradient_mD, None, None, None))
exchange.register_autograd(_exchange_backward, setup_context=_save_exchanged)
