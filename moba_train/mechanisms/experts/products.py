"""Products of the experts: tokens sorted by expert once, one grouped product each for gate, up and down.

There is no capacity and no padding: an expert gets the rows that chose it, also none. Sums over a token's experts are
in float32 and in the order of its choices, forward and backward, so that they repeat bit by bit.

Shape suffixes: T tokens, D hidden size, E experts, k experts of a token, n = T k choices, I width of an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moba_train.mechanisms.experts.options import MoeOptions
from moba_train.model.feed_forward import MatrixStack, clamped


class Experts(nn.Module):
    """SwiGLUs of equal size, or the clamped ones of gpt-oss."""

    def __init__(self, options: MoeOptions, hidden_size: int) -> None:
        super().__init__()
        number = options.experts
        width = options.intermediate_size
        self.clamp = options.clamp
        self.gate_proj = Projections(number, hidden_size, width, options.bias)
        self.up_proj = Projections(number, hidden_size, width, options.bias)
        self.down_proj = Projections(number, width, hidden_size, options.bias)

    def forward(self, x_nD: Tensor, weights_n1: Tensor, ends_E: Tensor) -> Tensor:
        """Results [n, D] of rows that are sorted by expert, times the router's weights [n, 1], float32 at least;
        `ends`, int32: where those of each expert end.

        The weights multiply what the down projection is given: their gradients then need no result of it, which a
        recomputed block would have to compute, and fetch from other ranks, again.
        """
        gate_nI = self.gate_proj(x_nD, ends_E)
        up_nI = self.up_proj(x_nD, ends_E)
        hidden_nI = F.silu(gate_nI) * up_nI if self.clamp is None else clamped(gate_nI, up_nI, self.clamp)
        down_nD: Tensor = self.down_proj((hidden_nI * weights_n1).to(x_nD.dtype), ends_E, weights_n1)
        return down_nD


class Projections(MatrixStack):
    """A linear layer of each expert."""

    def __init__(self, experts: int, columns_in: int, columns_out: int, has_bias: bool) -> None:
        super().__init__(experts, columns_in, columns_out)
        self.bias = nn.Parameter(torch.empty(experts, columns_out)) if has_bias else None

    def forward(self, x_nA: Tensor, ends_E: Tensor, weights_n1: Tensor | None = None) -> Tensor:
        """Results [n, B] of rows that are sorted by expert; with weights, these multiply the bias."""
        y_nB = grouped_product(x_nA, local_weight(self.weight), ends_E)
        if self.bias is None:
            return y_nB
        # A product with ones or weights, the fewest columns that 16 bits allow: its gradient is a sum in float32 in a
        # fixed order.
        bias_EB8 = F.pad(local_weight(self.bias).unsqueeze(2), (0, 7))
        ones_n1 = x_nA.new_ones(x_nA.shape[0], 1) if weights_n1 is None else weights_n1.to(x_nA.dtype)
        return y_nB + grouped_product(F.pad(ones_n1, (0, 7)), bias_EB8, ends_E)


def local_weight(weight: Tensor) -> Tensor:
    """This rank's part of a weight that is sharded over the ranks of a tp or ep group, with gradient."""
    return weight.to_local() if isinstance(weight, torch.distributed.tensor.DTensor) else weight


def grouped_product(x_nA: Tensor, weight_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """x @ weight[e].T for the rows of each expert e, [n, B]."""
    is_aligned = all(columns * x_nA.dtype.itemsize % 16 == 0 for columns in weight_EBA.shape[1:])
    if is_aligned and (x_nA.device.type, x_nA.dtype) in GROUPED:
        return F.grouped_mm(x_nA, weight_EBA.mT, offs=ends_E)
    return looped_product(x_nA, weight_EBA, ends_E)


def looped_product(x_nA: Tensor, weight_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """`grouped_product` expert by expert, in any dtype; waits for a GPU."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = [F.linear(x, weight) for x, weight in zip(x_nA.split(sizes), weight_EBA, strict=True)]
    return torch.cat(parts)


def _on_cpu(dtype: torch.dtype) -> bool:
    """True if torch has grouped products on a CPU in this dtype: those of the forward and of the backward pass."""
    x = torch.ones(16, 16, device="cpu", dtype=dtype)
    weight = torch.ones(2, 16, 16, device="cpu", dtype=dtype)
    ends = torch.tensor([0, 16], device="cpu", dtype=torch.int32)
    try:
        with torch.no_grad():
            return all(F.grouped_mm(*both, offs=ends).isfinite().all() for both in ((x, weight.mT), (x.mT, x)))
    except (RuntimeError, NotImplementedError):
        return False


GROUPED = {("cpu", dtype) for dtype in (torch.float32, torch.bfloat16) if _on_cpu(dtype)} | {("cuda", torch.bfloat16)}
"""Types of device, and dtypes, in which torch has grouped products, of rows of whole 16 bytes; elsewhere a loop takes
one expert at a time. Found here once: inside a layer, what a trial computes would be seen by what traces or recomputes
it."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_n: Tensor, places_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(places_Tk)
        return x_TD.index_select(0, rows_n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_nD: Tensor) -> tuple[Tensor, None, None]:
        (places_Tk,) = ctx.saved_tensors
        return _sum(gradient_nD, places_Tk), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_nD: Tensor, rows_n: Tensor, places_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(rows_n)
        return _sum(y_nD, places_Tk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, None, None]:
        (rows_n,) = ctx.saved_tensors
        return gradient_TD.index_select(0, rows_n), None, None


def _sum(y_nD: Tensor, places_Tk: Tensor) -> Tensor:
    """Sum over k of the rows `places` of y, [T, D]: in float32 at least, k ascending."""
    wide = torch.promote_types(y_nD.dtype, torch.float32)
    first_T, *further = places_Tk.unbind(1)
    total_TD = y_nD.index_select(0, first_T).to(wide)
    for places_T in further:
        total_TD += y_nD.index_select(0, places_T)
    return total_TD.to(y_nD.dtype)


def gather_rows(x_TD: Tensor, rows_n: Tensor, places_Tk: Tensor) -> Tensor:
    """The rows `rows` of x, [n, D]; `places` says where the k copies of each row are."""
    found: Tensor = _Gather.apply(x_TD, rows_n, places_Tk)
    return found


def sum_rows(y_nD: Tensor, rows_n: Tensor, places_Tk: Tensor) -> Tensor:
    """Sums [T, D] of the k rows of y that `gather_rows` would make of each; keeps no rows for the backward pass."""
    found: Tensor = _Sum.apply(y_nD, rows_n, places_Tk)
    return found


def inverse(order_n: Tensor) -> Tensor:
    """The place of each number in a permutation."""
    return torch.empty_like(order_n).scatter_(0, order_n, torch.arange(order_n.shape[0], device=order_n.device))
