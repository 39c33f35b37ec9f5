"""Selections of history blocks: the blocks with the highest scores, for kinds that score all blocks of a chunk of
queries; and the share of the keys that a selection is, and how it is spread (`SELECTION`).

Only free selections count for how they are spread. A query with at most topk - 1 earlier blocks takes them all, as do
queries at the first `dense_len` positions; the first blocks of a document and local ones that a kind forces are neither
free selections nor candidates.

Shape suffixes: T queries, t a part of them, H heads (or groups of heads), C selected blocks, N blocks of the packed
sequence, n a document's candidates.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.kernels.common.geometry import QueryBlocks, block_bound, query_blocks
from moba_train.attention.kernels.table import triton_runs_on
from moba_train.attention.layout import Layout
from moba_train.attention.statistics import Statistics, joined

KEY_SHARE = {"key_share": "keys attended to over keys before the query, its own included"}
"""Further statistics of every attention that leaves keys out, by name, with their meaning."""

SELECTION = KEY_SHARE | {
    "load_imbalance": "selections of the busiest block over the mean of the document's candidates; 1: even",
    "entropy": "of the selections over the candidates, relative to its maximum; 1: even, 0: all on one block",
    "first_block_share": "share of the queries that selected their document's first block, the attention sink",
    "distance": "how many blocks back the selected one lies, relative to the mean of the query's candidates",
}
"""Further statistics of an attention that selects blocks, by name, with their meaning."""


def choose_blocks(
    scores_HtN: Tensor, queries: QueryBlocks, history_blocks: int, *, first: int = 0, local: int = 1, start: int = 0
) -> Tensor:
    """The `history_blocks` blocks of each query's history with the highest scores: int32 [H, t, C], ascending, -1
    behind. The scores are those of N blocks from `start` on.

    C is `history_blocks`, or N if there are fewer. Blocks of the future and of other documents are never chosen,
    whatever their scores, nor those with a score of -inf. The `first` blocks of a document and the `local` ones that
    end with the diagonal block are chosen before all others and count towards `history_blocks`, except for the diagonal
    block, which is not listed. Of equal scores the lower block id wins.
    """
    if start:
        queries = QueryBlocks(queries.own_t - start, queries.first_t - start)
        chosen_HtC = choose_blocks(scores_HtN, queries, history_blocks, first=first, local=local)
        return chosen_HtC.add_(start * (chosen_HtC >= 0))
    history_blocks = min(history_blocks, scores_HtN.shape[-1])
    kernel = _kernel(scores_HtN)
    if kernel is not None:
        return kernel(scores_HtN, queries.own_t, queries.first_t, history_blocks, first=first, local=local)
    ids_N = torch.arange(scores_HtN.shape[-1], device=scores_HtN.device)
    diagonal_t1, first_t1 = (x.unsqueeze(-1) for x in queries)
    history_tN = (first_t1 <= ids_N) & (ids_N < diagonal_t1)
    # Forced blocks get the score +inf, so that they are among the best and count towards `history_blocks`.
    forced_tN = history_tN & ((ids_N < first_t1 + first) | (ids_N > diagonal_t1 - local))
    # NaN, the highest of all to `topk`, equals nothing: the comparisons of `_highest` would choose any block for it.
    scores_HtN = scores_HtN.nan_to_num(torch.finfo(scores_HtN.dtype).max, torch.inf, -torch.inf)
    scores_HtN = scores_HtN.masked_fill(~history_tN, -torch.inf).masked_fill(forced_tN, torch.inf)
    values_HtC, chosen_HtC = _highest(scores_HtN, history_blocks)
    chosen_HtC = torch.where(values_HtC == -torch.inf, len(ids_N), chosen_HtC).sort(-1).values
    return torch.where(chosen_HtC == len(ids_N), -1, chosen_HtC).int()


def _kernel(scores_HtN: Tensor) -> Callable[..., Tensor] | None:
    """The Triton kernel that chooses blocks, imported at the first use; None if it cannot take these scores."""
    if not triton_runs_on(scores_HtN):
        return None
    from moba_train.attention.kernels.triton import highest_scores

    return highest_scores.choose_blocks if highest_scores.able(scores_HtN) else None


def _highest(scores_HtN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The highest scores, descending, and where they are; `topk`, but of equal scores it takes the first ones.

    Which of them `topk` takes depends on the device and on N. Equal scores do occur: a window of keys may be the best
    of both blocks that it overlaps (infllm_v2).
    """
    values_HtC, at_HtC = scores_HtN.topk(count, dim=-1)
    if count == 0:
        return values_HtC, at_HtC
    lowest_Ht1 = values_HtC[..., -1:]
    ids_N = torch.arange(scores_HtN.shape[-1], dtype=torch.float32, device=scores_HtN.device)
    # float32 numbers of blocks are exact up to 2**24; negative, as `topk` takes the largest and the lowest id shall
    # win.
    first_equal_HtC = torch.where(scores_HtN == lowest_Ht1, -ids_N, -torch.inf).topk(count, dim=-1).indices
    above_Ht1 = (values_HtC > lowest_Ht1).sum(-1, keepdim=True)
    index_HtC = torch.arange(count, device=scores_HtN.device) - above_Ht1
    equal_HtC = first_equal_HtC.gather(-1, index_HtC.clamp(min=0))
    return values_HtC, torch.where(index_HtC < 0, at_HtC, equal_HtC)


@dataclass(frozen=True)
class Choice:
    """Blocks among which a query may choose, and their number."""

    block_size: int
    topk: int
    """Blocks of a query, the diagonal block included."""
    first: int = 0
    """Blocks at a document's start that are forced."""
    local: int = 1
    """Blocks up to the diagonal block that are forced, this one included."""
    dense_len: int = 0
    """Queries at these first positions of a document attend to everything."""


def selection_statistics(heads: Iterable[Tensor], layout: Layout, choice: Choice) -> Statistics:
    """Statistics of the history blocks that the layout's queries select, and of their diagonal blocks.

    heads: int32 [T, C] for each head, ids as in kernels/common/geometry.py, -1 behind. One at a time: all may be large.
    """
    counts: list[Tensor] = []

    def counted() -> Iterator[Tensor]:
        for selected_TC in heads:
            # Stays on the device: `.item()` here would make the host wait once for each head.
            counts.append((selected_TC >= 0).sum())
            yield selected_TC

    routing = routing_statistics(counted(), layout, choice)
    positions_T = layout.positions(layout.q_tokens, layout.q_documents)
    history = torch.stack(counts).double().mean() * choice.block_size
    return joined([routing, key_share(float(history + (positions_T % choice.block_size + 1).sum()), layout)])


def key_share(attended: float | None, layout: Layout) -> Statistics:
    """`key_share` of a layout's queries, given the pairs of a query and a key that a head attends to; None: to all."""
    seen = int((layout.positions(layout.q_tokens, layout.q_documents) + 1).sum())
    return Statistics({"key_share": 1.0 if attended is None else attended / seen}, seen) if seen else Statistics()


def routing_statistics(heads: Iterable[Tensor], layout: Layout, choice: Choice) -> Statistics:
    """Spread of the freely selected blocks; nothing without any.

    load_imbalance     selections of the busiest block of a document over the mean of the document's candidates; 1: even
    entropy            entropy of the selections over a document's candidates, relative to its maximum, the logarithm of
                       their number; 1: even, 0: all selections are one block
    first_block_share  share of the queries that selected the first block of their document
    distance           how many blocks the selected one lies before the query's own, relative to the mean of the query's
                       candidates; 1: as uniform selection, below: nearer

    The candidates of a document are the blocks that one of these queries could have selected. Every head has its own
    `load_imbalance` and `entropy` in every document; all numbers are means over selections, whose number is their
    weight.
    """
    diagonal_T, first_T = query_blocks(layout, choice.block_size)
    chooses_T = diagonal_T - first_T >= choice.topk
    chooses_T &= layout.positions(layout.q_tokens, layout.q_documents) >= choice.dense_len
    rows_t = chooses_T.nonzero().flatten()
    own_t, first_t = diagonal_T[rows_t], first_T[rows_t]
    # Candidates lie `local` to own - first blocks back, those at the document's start left out where they are forced.
    mean_distance_t1 = (own_t - first_t + choice.local - choice.first).unsqueeze(1) / 2
    blocks = block_bound(layout, choice.block_size)
    loads = []
    sums = []
    for selected_TC in heads:  # the host does not wait for a head
        selected_tC = selected_TC[rows_t].long()
        distance_tC = own_t.unsqueeze(1) - selected_tC
        is_free_tC = (selected_tC >= 0) & (distance_tC >= choice.local)
        is_free_tC &= selected_tC >= first_t.unsqueeze(1) + choice.first
        relative_tC = (distance_tC / mean_distance_t1).double() * is_free_tC
        sums.append(torch.stack([relative_tC.sum(), is_free_tC.any(1).sum().double()]))
        ids_x = torch.where(is_free_tC, selected_tC, blocks).flatten()
        loads.append(ids_x.new_zeros(blocks + 1).index_add_(0, ids_x, torch.ones_like(ids_x)))
    # The one transfer to the host; column `blocks` collects what is no free selection.
    load_HN = torch.stack(loads)[:, :blocks].double().cpu()
    distance, choosing = torch.stack(sums).sum(0).tolist()
    selected = int(load_HN.sum())
    if not selected:
        return Statistics()

    start_d, queries_d = first_t.unique_consecutive(return_counts=True)
    stop_d = own_t[queries_d.cumsum(0) - 1]  # queries ascend: a document's last has the most candidates
    imbalance = entropy = on_first = 0.0
    for start, stop in zip(start_d.tolist(), stop_d.tolist(), strict=True):
        load_Hn = load_HN[:, start + choice.first : stop - choice.local + 1]
        candidates = load_Hn.shape[1]
        total_H = load_Hn.sum(1)
        imbalance += candidates * load_Hn.amax(1).sum().item()
        nats_H = torch.xlogy(total_H, total_H) - torch.xlogy(load_Hn, load_Hn).sum(1)
        entropy += nats_H.sum().item() / math.log(candidates)
        on_first += load_HN[:, start].sum().item()
    of_selections = {"load_imbalance": imbalance, "entropy": entropy, "distance": distance}
    means = {name: value / selected for name, value in of_selections.items()}
    return Statistics(means | {"first_block_share": on_first / choosing}, selected)
