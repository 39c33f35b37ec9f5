"""Other implementations that MoBA's kernels are compared with: dense attention, FlexAttention with a mask of the same
selection, and other MoBAs that are installed."""

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_rows import Row, backends
from moba_train.attention.full import calls
from moba_train.attention.full.kernels import BACKENDS
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.protocol import BackwardState

Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""(forward, forward and backward)."""


@dataclass(frozen=True)
class Peer:
    """One column of the table."""

    name: str
    """Its key in the result file."""
    up_to: int
    """Longest sequence that it is measured at by default: beyond, dense attention takes minutes."""
    calls: Callable[[Row], Calls | None]
    """Its calls on a row's inputs; None where it cannot compute the row."""
    dense: bool = False
    """Whether it is dense attention; another MoBA is measured in plain rows only."""
    package: str = ""
    """Distribution whose version the result file records."""


def peers() -> list[Peer]:
    """Every peer that can be imported here."""
    ours = [Peer(name, 2**17, _our(name)) for name in backends()]
    dense = [Peer("cudnn", 2**18, _sdpa("CUDNN_ATTENTION"), dense=True), Peer("flash2", 2**16, _flash2, dense=True)]
    others = {
        "flash_attn.cute": Peer("flash4", 2**18, _flash4, dense=True, package="flash-attn-4"),
        "flash_moba": Peer("flash_moba", 2**18, _flash_moba, package="flash_moba"),
        # Scores of all heads, queries and blocks in float32.
        "fla.ops.moba": Peer("fla", 2**16, _fla, package="fla-core"),
        # It fails with an illegal address at 128K, after which the process cannot use the GPU any more.
        "moba.moba_efficient": Peer("moonshot", 2**16, _moonshot, package="moba"),
    }
    flex = Peer("flex", 2**17, _flex)
    return [*ours, *dense, flex, *(peer for module, peer in others.items() if _importable(module))]


def dense_key(row: Row) -> tuple[Any, ...]:
    """All that the time of dense attention depends on: rows with the same key need one measurement only."""
    case = row.case
    return case.tokens, case.heads, case.kv_heads, case.head_dim, case.documents


def versions(measured: list[Peer]) -> dict[str, str]:
    """Versions of the packages behind the peers."""
    found = {}
    for peer in measured:
        if peer.package:
            try:
                found[peer.name] = importlib.metadata.version(peer.package)
            except importlib.metadata.PackageNotFoundError:
                found[peer.name] = "unknown"
    return found


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # GPU packages fail in many ways where they do not fit; absent is the usual one
        return False
    return True


def _our(name: str) -> Callable[[Row], Calls | None]:
    def calls(row: Row) -> Calls:
        other = row.using(name)
        return other.forward, other.both

    return calls


def _sdpa(backend: str) -> Callable[[Row], Calls | None]:
    """torch's scaled_dot_product_attention with one document, the dense attention that most people call."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def calls(row: Row) -> Calls | None:
        if row.case.documents:
            return None
        q, k, v, dout = (x.transpose(0, 1).unsqueeze(0) for x in (row.q, row.k, row.v, row.dout))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return with_gradients(attend, (q, k, v), dout)

    return calls


def _flash2(row: Row) -> Calls | None:
    """FlashAttention-2 inside torch; packed documents go to its varlen operator."""
    return dense_backend("flash", row) if row.case.documents else _sdpa("FLASH_ATTENTION")(row)


def dense_backend(name: str, row: Row) -> Calls | None:
    """Calls of a backend of `kind: full` on the row's documents; None where it cannot compute them."""
    backend = BACKENDS[name]
    scale = row.attention.scale
    if not backend.takes(row.q, row.layout()):
        return None

    def forward() -> tuple[Tensor, Tensor]:
        return calls.attend(backend, row.q, row.k, row.v, row.layout(), scale)

    def both() -> Any:
        out, lse = forward()
        state = BackwardState(row.dout, row.q, row.k, row.v, out, lse)
        return out, calls.attend_backward(backend, state, row.layout(), scale)

    return forward, both


def with_gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor) -> Calls:
    """Forward alone, and forward and backward, of a differentiable function of (q, k, v)."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    def both() -> Any:
        out = attend(*leaves)
        return out, torch.autograd.grad(out, leaves, dout)

    return forward, both


def _flash4(row: Row) -> Calls | None:
    if row.case.documents:
        return None
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, causal=True)
        return out[0] if isinstance(out, tuple) else out  # with lse or without, by version

    q, k, v, dout = (x.unsqueeze(0) for x in (row.q, row.k, row.v, row.dout))
    return with_gradients(attend, (q, k, v), dout)


def _flex(row: Row) -> Calls | None:
    """FlexAttention, compiled. The selection is ours, and neither it nor the making of the mask is timed."""
    from torch.nn.attention.flex_attention import flex_attention

    from benchmarks.flex_moba import block_mask, fits

    # The compiled mask may find its entry of [heads, tokens, blocks] in int32, and an illegal address ends the process.
    if not fits(row.case) or row.case.heads * row.tokens * (row.tokens // row.block_size + 1) >= 2**31:
        return None
    mask = block_mask(row.selected(), row.block_size)
    torch._dynamo.reset()  # sizes are constants of the compiled code
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out

    q, k, v, dout = (x.transpose(0, 1).unsqueeze(0) for x in (row.q, row.k, row.v, row.dout))
    return with_gradients(attend, (q, k, v), dout)


def _fla(row: Row) -> Calls | None:
    function = importlib.import_module("fla.ops.moba").parallel_moba
    return _without_groups(
        row,
        lambda q, k, v, layout: function(
            q[None], k[None], v[None], layout.cu_seqlens, layout.max_seqlen, row.block_size, row.topk
        )[0],
    )


def _flash_moba(row: Row) -> Calls | None:
    function = importlib.import_module("flash_moba").flash_moba_varlen_func
    layout = packed_layout(row.case.lengths(), row.device)
    edges = layout.cu_seqlens
    longest = layout.max_seqlen

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k, v, edges, edges, longest, longest, row.block_size, row.topk, causal=True)

    return with_gradients(attend, (row.q, row.k, row.v), row.dout)


def _moonshot(row: Row) -> Calls | None:
    function = importlib.import_module("moba.moba_efficient").moba_attn_varlen
    return _without_groups(
        row, lambda q, k, v, layout: function(q, k, v, layout.cu_seqlens, layout.max_seqlen, row.block_size, row.topk)
    )


def _without_groups(row: Row, function: Callable[[Tensor, Tensor, Tensor, Layout], Tensor]) -> Calls:
    """Calls of a MoBA that wants a key/value head for each query head."""
    layout = packed_layout(row.case.lengths(), row.device)
    group = row.case.heads // row.case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), layout)

    return with_gradients(attend, (row.q, row.k, row.v), row.dout)
