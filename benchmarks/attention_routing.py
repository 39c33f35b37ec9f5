"""Queries and keys whose gate makes a known selection: an attention sink, neighbours, or any block alike.

Shape suffixes: T tokens, N blocks, H query heads, K key/value heads, D head width, C selected blocks.
"""

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import block_bound, block_ids, first_blocks
from moba_train.attention.moba.gate import pool_keys
from moba_train.attention.protocol import Layout

ROUTINGS = ("random", "sink", "local", "uniform")
SINK = 5.0
LOCAL = 8.0
"""Lengths of the added vectors: the gate rises by their squares, far above its noise, scores by a few nats only."""


def routed_inputs(
    routing: str,
    layout: Layout,
    sizes: tuple[int, int, int],
    block_size: int,
    topk: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D] and k [T, K, D] of `sizes` (H, K, D) on the layout's device.

    random: independent normal numbers. The others give every block's keys a mean that is known exactly, plus normal
    numbers whose mean is 0. uniform: means in random directions, so that all blocks are equally likely. sink: as
    uniform, but the first block of each document has the largest gate of all its queries. local: the mean's direction
    turns from block to block, so that the nearest blocks have the largest gates.
    """
    heads, kv_heads, width = sizes
    device = layout.cu_seqlens.device

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

    if routing == "random":
        return normal(layout.total, heads, width, dtype=dtype), normal(layout.total, kv_heads, width, dtype=dtype)
    q_THD = normal(layout.total, heads, width)
    k_TKD = normal(layout.total, kv_heads, width)
    ids_T = block_ids(layout.k_tokens, layout.k_documents, layout, block_size)
    k_TKD -= pool_keys(k_TKD, layout, block_size)[ids_T]
    blocks = block_bound(layout, block_size)
    if routing == "local":
        turning_ND = _turning(blocks, width, topk, device)
        means_NKD = LOCAL * turning_ND[:, None].expand(-1, kv_heads, -1)
        q_THD += LOCAL * turning_ND[ids_T, None]
    else:
        means_NKD = torch.nn.functional.normalize(normal(blocks, kv_heads, width), dim=-1)
        if routing == "sink":
            direction_D = torch.nn.functional.normalize(normal(width), dim=0)
            firsts = first_blocks(layout.cu_seqlens, block_size)[:-1]
            means_NKD[firsts] = SINK * direction_D
            q_THD += SINK * direction_D
    k_TKD += means_NKD[ids_T]
    return q_THD.to(dtype), k_TKD.to(dtype)


def _turning(blocks: int, width: int, topk: int, device: torch.device) -> Tensor:
    """Unit vectors [N, D] whose product falls with their distance x as exp(-x^2 / (2 topk^2)), without side lobes."""
    quantiles = (torch.arange(width // 2, device=device, dtype=torch.float64) + 0.5) / (width // 2)
    speeds = torch.special.ndtri(quantiles) / topk
    angles = torch.arange(blocks, device=device, dtype=torch.float64)[:, None] * speeds
    return (torch.cat([angles.cos(), angles.sin()], -1) * (width // 2) ** -0.5).float()


def routed_fraction(routing: str, layout: Layout, selected_HTC: Tensor, block_size: int) -> float:
    """Fraction of the selected history blocks (int [H, T, C], -1 = none) that `routing` intends, 0 to 1.

    sink: fraction of the queries with any history that selected their document's first block. local: fraction of the
    selected blocks that are among the nearest C. random, uniform: overlap of the blocks' query counts with those of an
    even selection.
    """
    first_N = first_blocks(layout.cu_seqlens, block_size)
    own_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    first_T = first_N[layout.q_documents]
    heads, _, count = selected_HTC.shape
    if count == 0 or not bool((own_T > first_T).any()):
        return 1.0
    if routing == "sink":
        return (selected_HTC == first_T[:, None]).any(-1)[:, own_T > first_T].double().mean().item()
    valid_HTC = selected_HTC >= 0
    if routing == "local":
        near_HTC = valid_HTC & (selected_HTC >= own_T[:, None] - count)
        return (near_HTC.sum() / valid_HTC.sum()).item()
    blocks = block_bound(layout, block_size)
    got_N = torch.bincount(selected_HTC[valid_HTC], minlength=blocks).double()
    # A query of block o spreads min(C, h) selections over its h = o - first blocks of history.
    history_T = (own_T - first_T).double()
    expected_T = heads * history_T.clamp(max=count) / history_T.clamp(min=1)
    by_own_N = torch.zeros(blocks + 1, dtype=torch.float64, device=own_T.device).index_add_(0, own_T, expected_T)
    from_here_N = by_own_N.flip(0).cumsum(0).flip(0)
    ids_N = torch.arange(blocks, device=own_T.device)
    document_N = torch.searchsorted(first_N[1:], ids_N, right=True).clamp(max=first_N.numel() - 2)
    want_N = from_here_N[1:] - from_here_N[first_N[1:][document_N].clamp(max=blocks)]
    return (torch.minimum(got_N, want_N).sum() / want_N.sum()).item()
