"""Linear attention by the kernels of fla-core (https://github.com/fla-org/flash-linear-attention), imported when used.

Shape suffixes: n rows, H query heads, K key/value heads, d head width, N segments.
"""

import importlib.util
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moba_train.attention.layout import Layout
from moba_train.mechanisms.linear.states import segment_edges

PACKAGE = "fla-core"


@cache
def has_fla() -> bool:
    """True if the package is installed; it is not imported."""
    return importlib.util.find_spec("fla") is not None


def fla_refuses(x: Tensor) -> str:
    """Reason why the kernels cannot work on tensors of this device and dtype; empty if they can."""
    if not x.is_cuda:
        return f"tensors are on {x.device.type}, not on CUDA"
    if x.dtype == torch.float64:
        return "dtype torch.float64, at most float32 supported"
    if not has_fla():
        return f"the package {PACKAGE} is not installed"
    return ""


def fla_problem(device: str | None, deterministic: bool) -> str:
    """Reason why the kernels cannot train a run on `device` (None: not known yet); empty if they can.

    Their block sizes are chosen by timing, so that two runs may sum in different orders.
    """
    if device is not None and device != "cuda":
        return f"the run trains on {device}, CUDA needed"
    if device == "cuda" and not has_fla():
        return f"the package {PACKAGE} is not installed"
    if deterministic:
        return "its kernels are tuned by timing and not reproducible, with deterministic: true"
    return ""


@torch.compiler.disable
def fla_decayed_attention(q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor, log_decay_H: Tensor, layout: Layout) -> Tensor:
    """`decayed.decayed_attention` inside the segments of the layout's queries.

    The backward pass repeats the forward pass, a third of its own time: the kernels would keep silu(q), and silu(k) and
    v for every query head.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    edges, edges_cpu = segment_edges(layout)

    def attend(q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> Tensor:
        group = q_nHd.shape[1] // k_nKd.shape[1]
        inputs = (F.silu(q_nHd), F.silu(k_nKd).repeat_interleave(group, 1), v_nKd.repeat_interleave(group, 1))
        out_1nHd, _ = chunk_simple_gla(
            *(x.unsqueeze(0) for x in inputs),
            g_gamma=log_decay_H.float(),
            scale=1.0,
            cu_seqlens=edges,
            cu_seqlens_cpu=edges_cpu,
        )
        return out_1nHd.squeeze(0)

    # Keeps q, k and v alone, as the plain version: silu, repeated heads and the kernels' states are made again.
    return checkpoint(attend, q_nHd, k_nKd, v_nKd, use_reentrant=False, preserve_rng_state=False)


@torch.compiler.disable
def fla_delta_attention(
    q_nHd: Tensor,
    k_nKd: Tensor,
    v_nKd: Tensor,
    decay_nHd: Tensor,
    beta_nH: Tensor,
    A_log_H: Tensor,
    dt_bias_h: Tensor,
    edges: tuple[Tensor, Tensor],
    initial_NHdd: Tensor | None,
    wants_states: bool,
    recomputed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule of `kda` inside segments, from the results of its projections; and the states behind the segments,
    float32, if wanted. `edges`: of the segments, as `states.segment_edges` gives them. `recomputed`: True if it is
    called again right before its backward pass, which then need not compute half of it once more.

    Norms and sigmoid are PyTorch's: fla-core's kernels for them take nine of its thirty launches, for which the host
    has no time, and are tuned again for each number of rows. PyTorch's rows have length sqrt(d) instead of 1, for which
    beta / d, and states divided by sqrt(d), compensate.
    """
    from fla.ops.kda import chunk_kda

    width = q_nHd.shape[-1]
    beta_nH = beta_nH.to(torch.promote_types(beta_nH.dtype, torch.float32)).sigmoid() / width
    q_nHd, k_nKd = (F.rms_norm(x, (width,), eps=1e-6 / width) for x in (q_nHd, k_nKd))
    k_nHd, v_nHd = (x.repeat_interleave(q_nHd.shape[1] // x.shape[1], 1) for x in (k_nKd, v_nKd))
    out_1nHd, behind_NHdd = chunk_kda(
        *(x.unsqueeze(0) for x in (q_nHd, k_nHd, v_nHd, decay_nHd, beta_nH)),
        A_log=A_log_H,
        dt_bias=dt_bias_h,
        initial_state=None if initial_NHdd is None else initial_NHdd * width**-0.5,
        output_final_state=wants_states,
        # The decays in float32 would be a tensor twice the size of q; the kernel makes them from the projection in 16
        # bits.
        use_gate_in_kernel=True,
        # With this and PyTorch's norms above, a part has 18 launches, not 30 (benchmarks/LOG.md, Other kinds of
        # attention).
        disable_recompute=recomputed,
        cu_seqlens=edges[0],
        cu_seqlens_cpu=edges[1],
    )
    return out_1nHd.squeeze(0), behind_NHdd * width**0.5 if wants_states else None
