"""Random inputs, and gradients of a weighted sum, for the attention tests."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from moba_train.attention.layout import TokenRange, TokenRanges

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def triple(tensors: Iterable[Tensor]) -> Triple:
    """q, k and v, which must be three."""
    q, k, v = tensors
    return q, k, v


def only(result: Tensor | Pair) -> Tensor:
    """The output of `moba_attention`, which was not asked for the log-sum-exp."""
    assert isinstance(result, Tensor)
    return result


def both(result: Tensor | Pair) -> Pair:
    """Output and log-sum-exp of `moba_attention`."""
    assert not isinstance(result, Tensor)
    return result


def ranges(*edges: tuple[int, int]) -> TokenRanges:
    """Token ranges from their (start, stop)."""
    return tuple(TokenRange(*pair) for pair in edges)


def labelled(label: object) -> Callable[[str], str]:
    """A message for `assert_close`: its own after a label."""
    return lambda message: f"{label}: {message}"


def make_qkv(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Triple:
    """Random q, k, v with gradients, the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return triple(
        torch.randn(tokens, n, head_dim, dtype=torch.float64, generator=generator).to(device, dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def edges(lengths: list[int], device: torch.device | str = "cpu") -> Tensor:
    """cu_seqlens of documents of these lengths."""
    cumulated = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(cumulated, dtype=torch.int32, device=device)


def run(function: Callable[..., tuple[Tensor, Tensor]], qkv: Sequence[Tensor], seed: int = 1) -> list[Tensor]:
    """[out, lse, dq, dk, dv] of `function(q, k, v)` for a random upstream gradient, the same for equal shapes."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out)
    grads = torch.autograd.grad(out, leaves, dout) if out.numel() else [torch.zeros_like(x) for x in leaves]
    return [out.detach(), lse.detach(), *grads]


NAMES = ("out", "lse", "dq", "dk", "dv")


def assert_all_close(got: Sequence[Tensor], want: Sequence[Tensor], atol: float = 2e-12) -> None:
    """Each of out, lse, dq, dk, dv agrees; the message names the one that does not."""
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a.double().cpu(), b.double().cpu(), atol=atol, rtol=0, msg=labelled(name))
