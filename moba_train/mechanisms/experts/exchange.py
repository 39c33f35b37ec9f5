"""Expert parallelism: tokens travel to the ranks that hold their experts, and results back, by all-to-all.

Each rank of the group has an equal range of the experts, in the order of the ranks. Numbers of rows travel first, and
the host reads them: a rank may send all of its rows to one other rank, or none, and may receive none. Gradients travel
the same ways back. The rows that a rank receives are sorted by expert, then by the rank that sent them.

Shape suffixes: D hidden size, E experts, n rows of this rank, m rows that it receives.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moba_train.mechanisms.experts.products import gather_rows


class _AllToAll(torch.autograd.Function):
    """Sends `sent[i]` rows to rank i of the group and receives `received[i]` rows from it. The transfer may still be
    under way when it returns; `works` then has its handle."""

    @staticmethod
    def forward(
        ctx: Any, x_nD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, works: list[Any]
    ) -> Tensor:
        ctx.arguments = sent, received, group
        out_mD = x_nD.new_empty(sum(received), x_nD.shape[1])
        works.append(dist.all_to_all_single(out_mD, x_nD.contiguous(), received, sent, group=group, async_op=True))
        return out_mD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_mD: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, group = ctx.arguments
        out_nD = gradient_mD.new_empty(sum(sent), gradient_mD.shape[1])
        dist.all_to_all_single(out_nD, gradient_mD.contiguous(), sent, received, group=group)
        return out_nD, None, None, None, None


@torch.compiler.disable
def at_their_experts(
    x_nD: Tensor,
    ends_E: Tensor,
    experts: Callable[[Tensor, Tensor], Tensor],
    group: dist.ProcessGroup,
    meanwhile: Callable[[], Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Results [n, D] of rows that are sorted by expert, in their order, and that of `meanwhile`, which is called while
    rows travel.

    ends: where the rows of each of all experts end, int32 [E]. experts: computes the results of this rank's experts,
    given rows sorted by them and where those of each end.
    """
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    arriving_E = torch.empty_like(counts_E)  # from each rank, for each expert here
    dist.all_to_all_single(arriving_E, counts_E, group=group)
    ranks = group.size()
    both = torch.stack([counts_E, arriving_E]).view(2, ranks, -1).sum(2)
    sent, received = both.tolist()  # the host waits for the GPU: the sizes of the transfers follow from it
    works: list[Any] = []
    arrived_mD = _AllToAll.apply(x_nD, sent, received, group, works)
    here = len(counts_E) // ranks
    expert_m = (
        torch.arange(here, device=x_nD.device).repeat(ranks).repeat_interleave(arriving_E, output_size=sum(received))
    )
    order_m = expert_m.sort(stable=True).indices
    places_m = torch.empty_like(order_m)
    places_m[order_m] = torch.arange(len(order_m), device=order_m.device)
    ends = arriving_E.view(ranks, here).sum(0).cumsum(0).int()
    other = meanwhile()
    works.pop().wait()
    y_mD = experts(gather_rows(arrived_mD, order_m, places_m[:, None]), ends)
    back_nD = _AllToAll.apply(gather_rows(y_mD, places_m, order_m[:, None]), received, sent, group, works)
    works.pop().wait()
    return back_nD, other
