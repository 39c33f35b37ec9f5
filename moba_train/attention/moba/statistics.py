"""Routing statistics: how the blocks that the gate selected are spread. Spike dumps report them (health/dump.py).

Only free selections count. A query with at most topk - 1 earlier blocks takes them all; a block that `always` forces is
neither a free selection nor a candidate.

Shape suffixes: T queries, t those that select freely, H query heads, C selected blocks, N blocks, n a document's
candidates.
"""

import math

import torch
from torch import Tensor

from moba_train.attention.blocks.geometry import block_bound, block_ids, first_blocks
from moba_train.attention.protocol import Layout


def routing_statistics(
    selected_HTC: Tensor, layout: Layout, *, block_size: int, topk: int, always: tuple[str, ...]
) -> dict[str, float]:
    """Routing statistics of selected blocks, int32 [H, T, C], of the layout's queries; {} without a free selection.

    selected           (query, head, block) that were freely selected
    load_imbalance     selections of the busiest block of a document over the mean of the document's candidates; 1: even
    entropy            entropy of the selections over a document's candidates, relative to its maximum, the logarithm of
                       their number; 1: even, 0: all selections are one block
    first_block_share  share of the queries that selected the first block of their document
    distance           how many blocks the selected one lies before the query's own, relative to the mean of the query's
                       candidates; 1: as uniform selection, below: nearer

    The candidates of a document are the blocks that one of these queries could have selected. Every head has its own
    `load_imbalance` and `entropy` in every document; all numbers are means over selections.
    """
    previous, first = (int(name in always) for name in ("previous", "first"))
    free = topk - 1 - previous - first
    first_T = first_blocks(layout.cu_seqlens, block_size)[layout.q_documents]
    own_T = block_ids(layout.q_tokens, layout.q_documents, layout, block_size)
    rows_t = (own_T - first_T >= topk).nonzero().flatten()
    if free == 0 or rows_t.numel() == 0:
        return {}

    own_t, first_t = own_T[rows_t], first_T[rows_t]
    # Candidates lie 1 + previous to own - first blocks back, the first block left out where it is forced.
    mean_distance_t1 = (own_t - first_t + 1 + previous - first).unsqueeze(1) / 2
    loads = []
    distance = 0.0
    for selected_TC in selected_HTC:  # a head at a time: an int64 copy of all would be twice the size
        selected_tC = selected_TC[rows_t].long()
        distance_tC = own_t.unsqueeze(1) - selected_tC
        is_free_tC = selected_tC >= 0
        if previous:
            is_free_tC &= distance_tC > 1
        if first:
            is_free_tC &= selected_tC > first_t.unsqueeze(1)
        distance += (distance_tC / mean_distance_t1)[is_free_tC].sum(dtype=torch.float64).item()
        loads.append(selected_tC[is_free_tC].bincount(minlength=block_bound(layout, block_size)))
    load_HN = torch.stack(loads).double().cpu()
    selected = int(load_HN.sum())

    start_d, queries_d = first_t.unique_consecutive(return_counts=True)
    stop_d = own_t[queries_d.cumsum(0) - 1]  # queries ascend: a document's last has the most candidates
    imbalance = entropy = first_share = 0.0
    for start, stop in zip(start_d.tolist(), stop_d.tolist(), strict=True):
        load_Hn = load_HN[:, start + first : stop - previous]
        candidates = load_Hn.shape[1]
        total_H = load_Hn.sum(1)
        imbalance += candidates * load_Hn.amax(1).sum().item()
        nats_H = torch.xlogy(total_H, total_H) - torch.xlogy(load_Hn, load_Hn).sum(1)
        entropy += nats_H.sum().item() / math.log(candidates)
        first_share += free * load_HN[:, start].sum().item()
    return {
        "selected": selected,
        "load_imbalance": imbalance / selected,
        "entropy": entropy / selected,
        "first_block_share": first_share / selected,
        "distance": distance / selected,
    }
