"""How the blocks are spread that the gate chose: what a spike is looked at for (health/dump.py).

Only free choices count. A query with at most topk - 1 earlier blocks takes them all; a block that `always` forces is
neither a choice nor a candidate.

Shape suffixes: T queries, t those that had a choice, H query heads, C choices, N blocks, n a document's candidates.
"""

import math

import torch
from torch import Tensor

from moba_train.attention.moba.blocks import block_bound, block_ids, first_blocks
from moba_train.attention.protocol import Layout


def choice_statistics(
    chosen_HTC: Tensor, layout: Layout, *, block_size: int, topk: int, always: tuple[str, ...]
) -> dict[str, float]:
    """What `LocalAttention.describe_plan` tells of a choice, int32 [H, T, C], of the layout's queries.

    choices            (query, head, block) that were freely chosen
    load_imbalance     choices of the busiest block of a document over the mean of the document's candidates; 1: even
    entropy            of the choices over a document's candidates, relative to its maximum, the logarithm of their
                       number; 1: even, 0: all choices are one block
    first_block_share  share of the queries that chose the first block of their document
    distance           how many blocks the chosen one lies before the query's own, relative to the mean of the query's
                       candidates; 1: what uniform choice gives, below: nearer

    The candidates of a document are the blocks that one of these queries could have chosen. Of `load_imbalance` and
    `entropy`, every head has its own in every document; all numbers are means over choices. {} without any.
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
    loads, distance = [], 0.0
    for chosen_TC in chosen_HTC:  # a head at a time: int64 copies of the whole choice would be twice its size
        chosen_tC = chosen_TC[rows_t].long()
        distance_tC = own_t.unsqueeze(1) - chosen_tC
        is_free_tC = chosen_tC >= 0
        if previous:
            is_free_tC &= distance_tC > 1
        if first:
            is_free_tC &= chosen_tC > first_t.unsqueeze(1)
        distance += (distance_tC / mean_distance_t1)[is_free_tC].sum(dtype=torch.float64).item()
        loads.append(chosen_tC[is_free_tC].bincount(minlength=block_bound(layout, block_size)))
    load_HN = torch.stack(loads).double().cpu()
    choices = int(load_HN.sum())

    start_d, queries_d = first_t.unique_consecutive(return_counts=True)
    stop_d = own_t[queries_d.cumsum(0) - 1]  # queries ascend: a document's last has the most candidates
    imbalance = entropy = first_share = 0.0
    for start, stop in zip(start_d.tolist(), stop_d.tolist(), strict=True):
        load_Hn = load_HN[:, start + first : stop - previous]
        candidates, total_H = load_Hn.shape[1], load_Hn.sum(1)
        imbalance += candidates * load_Hn.amax(1).sum().item()
        nats_H = torch.xlogy(total_H, total_H) - torch.xlogy(load_Hn, load_Hn).sum(1)
        entropy += nats_H.sum().item() / math.log(candidates)
        first_share += free * load_HN[:, start].sum().item()
    return {
        "choices": choices,
        "load_imbalance": imbalance / choices,
        "entropy": entropy / choices,
        "first_block_share": first_share / choices,
        "distance": distance / choices,
    }
