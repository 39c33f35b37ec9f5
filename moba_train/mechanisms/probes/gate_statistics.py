"""Statistics of a layer's gate, measured against full attention of the same queries to the same keys.

Everything is computed for a sample of queries, exactly, in float32 (float64 for float64 tensors), from the queries,
keys and values that the layer attends with. A query counts if its document has more history blocks than it may select;
otherwise there is nothing to choose.

Shape suffixes: n sampled queries of this rank, m those of them that choose, t a chunk of these, S keys of the whole
sequence, H query heads, K key/value heads, G = H / K, D head width, N blocks, C selected blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moba_train.attention.facets import Gated, SelectedBlocks
from moba_train.attention.kernels.common.geometry import block_bound, block_ids, first_blocks
from moba_train.attention.kernels.common.reference import accumulation_dtype, query_chunks
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import LocalAttention

DISTANCES = 16
"""Buckets of distance in blocks: 1, 2, 3-4, 5-8, ..., the last one open."""


@dataclass
class GateStatistics:
    """Sums over queries, heads and selections of one layer, on one rank."""

    distances: Tensor
    """float64 [H, DISTANCES]: selections of each head by their distance from the query's diagonal block."""
    sums: dict[str, float] = field(default_factory=dict)
    """Other sums, by the names in `SUMS`."""

    @classmethod
    def of_heads(cls, heads: int) -> "GateStatistics":
        """Sums of no query: zeros for this number of heads."""
        return cls(torch.zeros(heads, DISTANCES, dtype=torch.float64))

    def __add__(self, other: "GateStatistics") -> "GateStatistics":
        return self.from_vector([a + b for a, b in zip(self.vector(), other.vector(), strict=True)])

    def add(self, **values: Tensor | float) -> None:
        """Add to the sums of these names."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def vector(self) -> list[float]:
        """All sums in a fixed order, for an all-reduce."""
        return [self.sums.get(name, 0.0) for name in SUMS] + self.distances.flatten().tolist()

    @classmethod
    def from_vector(cls, values: list[float]) -> "GateStatistics":
        """Inverse of `vector`."""
        count = len(SUMS)
        distances = torch.tensor(values[count:], dtype=torch.float64).view(-1, DISTANCES)
        return cls(distances, dict(zip(SUMS, values[:count], strict=True)))

    def means(self) -> dict[str, float]:
        """Statistics by name (`MEANS`); empty if no query had a choice."""
        rows = self.sums.get("rows", 0.0)
        if not rows:
            return {}
        selections = self.sums["selections"]
        means = {
            "mass_recall": self.sums["mass_recall"] / rows,
            "block_recall": self.sums["block_recall"] / rows,
            "output_error": self.sums["output_error"] / rows,
            "mass_entropy": self.sums["mass_entropy"] / rows,
            "first_block_share": self.sums["first_block"] / rows,
            "head_diversity": self.sums["distinct"] / selections if selections else 1.0,
            "load_imbalance": self.sums["load_imbalance"] / self.sums["heads"],
            "never_selected": self.sums["never_selected"] / self.sums["heads"],
        }
        if scored := self.sums.get("scored", 0.0):
            means["margin"] = self.sums["margin"] / scored
            means["gate_entropy"] = self.sums["gate_entropy"] / scored
        return means


MEANS = {
    "mass_recall": "share of full attention's probability that lies in the blocks attended to",
    "block_recall": "share of the selected blocks that are among as many history blocks with the most probability",
    "output_error": "norm of the difference to full attention's output, relative to that output's norm",
    "mass_entropy": "entropy of full attention's probability over history blocks, relative to its maximum",
    "first_block_share": "share of queries that select their document's first block",
    "margin": "lowest gate selected less the highest gate not selected, in units of attention's logits",
    "gate_entropy": "entropy of the softmax of the gates over history blocks, relative to its maximum",
    "head_diversity": "different blocks that heads which share keys select, relative to all that they select; 1: no "
    "two alike",
    "load_imbalance": "selections of a head's busiest block over the mean of its blocks, among the sampled queries",
    "never_selected": "share of blocks that no sampled query of a head selects",
}
"""Meaning of each statistic. All are means over the sampled queries and heads that have a choice."""

SUMS = (
    "seen",
    "rows",
    "selections",
    "heads",
    "mass_recall",
    "block_recall",
    "output_error",
    "mass_entropy",
    "first_block",
    "scored",
    "margin",
    "gate_entropy",
    "distinct",
    "load_imbalance",
    "never_selected",
)


def gate_statistics(
    q_nHD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    attention: LocalAttention,
    layout: Layout,
    given: SelectedBlocks | None = None,
) -> GateStatistics:
    """Sums of one layer for the queries of `layout` ([n, H, D]) to all keys of the sequence.

    Without `given`, the blocks of `attention` that the layer's gate gave, the attention selects again, as it does in
    training. Nothing is added if it has no gate, or attends to everything.
    """
    found = GateStatistics.of_heads(q_nHD.shape[1])
    gate = None
    if given is None and isinstance(attention, Gated):
        gate = attention.gate(q_nHD, attention.summarize(k_SKD, layout.part(None, None)), layout)
    selected = given if gate is None else gate.selected
    if selected is None:
        return found
    selected_HnC, size = selected
    first_n = first_blocks(layout.cu_seqlens, size)[layout.q_documents]
    own_n = block_ids(layout.q_tokens, layout.q_documents, layout, size)
    # An attention that selects by itself may have more slots than queries with a choice fill.
    filled = selected_HnC.shape[2] if gate is None else (selected_HnC >= 0).sum(-1).amax(0)
    rows_m = (own_n - first_n > filled).nonzero().flatten()
    if rows_m.numel() == 0:
        return found
    selected_HmC = selected_HnC[:, rows_m].long()
    if gate is not None:
        selected_HmC = selected_HmC[..., (selected_HmC >= 0).flatten(0, 1).any(0)]
    choice = _Choice(selected_HmC, own_n[rows_m], first_n[rows_m], block_bound(layout, size))
    _add_selection(found, choice, k_SKD.shape[1])
    if gate is not None and gate.scores is not None:
        _add_gates(found, choice, gate.scores[:, rows_m])
    keys = _Keys(k_SKD, v_SKD, layout, size)
    dtype = accumulation_dtype(q_nHD.dtype)
    heads = q_nHD.shape[1]
    for rows in query_chunks(len(rows_m), 4 * heads * k_SKD.shape[0], q_nHD.device):
        q_tHD = q_nHD[rows_m[rows]].to(dtype)
        _add_mass(found, choice.part(rows), q_tHD, layout.q_tokens[rows_m[rows]], keys, q_tHD.shape[-1] ** -0.5)
    return found


@dataclass(frozen=True)
class _Choice:
    """Selections of the choosing queries."""

    selected_HmC: Tensor
    """Block ids; -1 for the slots that a gate leaves empty."""
    own_m: Tensor
    first_m: Tensor
    blocks: int

    def part(self, rows: slice) -> "_Choice":
        return _Choice(self.selected_HmC[:, rows], self.own_m[rows], self.first_m[rows], self.blocks)

    @property
    def candidate_mN(self) -> Tensor:
        """True for the blocks in a query's history, bool [m, N]."""
        ids_N = torch.arange(self.blocks, device=self.own_m.device)
        return (ids_N >= self.first_m[:, None]) & (ids_N < self.own_m[:, None])

    @property
    def selected_HmN(self) -> Tensor:
        """True for the history blocks that are selected, bool [H, m, N]."""
        heads, rows, _ = self.selected_HmC.shape
        # One column more takes the empty slots, and is cut off.
        chosen = torch.zeros(heads, rows, self.blocks + 1, dtype=torch.bool, device=self.own_m.device)
        chosen.scatter_(2, torch.where(self.selected_HmC < 0, self.blocks, self.selected_HmC), True)
        return chosen[:, :, : self.blocks]


class _Keys:
    """Keys and values of the whole sequence, for scores of any queries."""

    def __init__(self, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, block_size: int) -> None:
        dtype = accumulation_dtype(k_SKD.dtype)
        self.k_KDS = k_SKD.to(dtype).permute(1, 2, 0)
        self.v_KSD = v_SKD.to(dtype).transpose(0, 1)
        whole = layout.part(None, None)
        self.documents_S = whole.k_documents
        self.blocks_S = block_ids(whole.k_tokens, whole.k_documents, whole, block_size)

    def probabilities(self, q_tHD: Tensor, tokens_t: Tensor, scale: float) -> Tensor:
        """Probabilities of full attention, [H, t, S]."""
        kv_heads = self.k_KDS.shape[0]
        q_KND = q_tHD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        scores_HtS = (q_KND @ self.k_KDS).unflatten(1, (-1, q_tHD.shape[0])).flatten(0, 1) * scale
        keys_S = torch.arange(len(self.documents_S), device=tokens_t.device)
        seen_tS = (keys_S <= tokens_t[:, None]) & (self.documents_S == self.documents_S[tokens_t][:, None])
        return scores_HtS.masked_fill(~seen_tS, -torch.inf).softmax(-1)

    def output(self, p_HtS: Tensor) -> Tensor:
        """Values weighted by `p_HtS`, [H, t, D]."""
        kv_heads = self.v_KSD.shape[0]
        heads, rows, _ = p_HtS.shape
        out_KND = p_HtS.unflatten(0, (kv_heads, -1)).flatten(1, 2) @ self.v_KSD
        return out_KND.unflatten(1, (heads // kv_heads, rows)).flatten(0, 1)


def _add_mass(
    found: GateStatistics, choice: _Choice, q_tHD: Tensor, tokens_t: Tensor, keys: _Keys, scale: float
) -> None:
    """Add the probability that full attention gives to the blocks attended to, and the error of the output."""
    p_HtS = keys.probabilities(q_tHD, tokens_t, scale)
    heads, rows, _ = p_HtS.shape
    mass_HtN = p_HtS.new_zeros(heads, rows, choice.blocks).index_add_(2, keys.blocks_S, p_HtS)
    selected_HtN = choice.selected_HmN
    ids_N = torch.arange(choice.blocks, device=tokens_t.device)
    attended_HtN = selected_HtN | (ids_N == choice.own_m[:, None])
    history_HtN = mass_HtN.masked_fill(~choice.candidate_mN, -1.0)
    best_HtC = history_HtN.topk(choice.selected_HmC.shape[2], dim=-1).indices
    full_HtD = keys.output(p_HtS)
    kept_HtS = p_HtS * attended_HtN[:, :, keys.blocks_S]
    recall_Ht = kept_HtS.sum(-1)
    sparse_HtD = keys.output(kept_HtS / recall_Ht[..., None])
    found.add(
        mass_recall=recall_Ht.double().sum(),
        block_recall=selected_HtN.gather(2, best_HtC).double().mean(-1).sum(),
        output_error=((sparse_HtD - full_HtD).norm(dim=-1) / full_HtD.norm(dim=-1)).double().sum(),
        mass_entropy=_relative_entropy(history_HtN.clamp(min=0), choice.candidate_mN).sum(),
    )


def _add_gates(found: GateStatistics, choice: _Choice, scores: Tensor) -> None:
    """Margin and entropy of the gates, [H or K, m, N]."""
    heads = choice.selected_HmC.shape[0]
    gates_HmN = scores.repeat_interleave(heads // scores.shape[0], dim=0)
    candidate_mN = choice.candidate_mN
    selected_HmN = choice.selected_HmN
    lowest_Hm = gates_HmN.masked_fill(~selected_HmN, torch.inf).amin(-1)
    highest_Hm = gates_HmN.masked_fill(selected_HmN | ~candidate_mN, -torch.inf).amax(-1)
    weights_HmN = gates_HmN.masked_fill(~candidate_mN, -torch.inf).softmax(-1)
    found.add(
        scored=gates_HmN.shape[0] * gates_HmN.shape[1],
        margin=(lowest_Hm - highest_Hm).double().sum(),
        gate_entropy=_relative_entropy(weights_HmN, candidate_mN).sum(),
    )


def _relative_entropy(weights_HmN: Tensor, candidate_mN: Tensor) -> Tensor:
    """Entropy of the weights, normalised over candidates, relative to the logarithm of their number, [H, m]."""
    p_HmN = weights_HmN.double() / weights_HmN.double().sum(-1, keepdim=True)
    return -torch.xlogy(p_HmN, p_HmN).sum(-1) / candidate_mN.sum(-1).double().log()


def _add_selection(found: GateStatistics, choice: _Choice, kv_heads: int) -> None:
    """Add the spread of the selected blocks, for which no keys are needed."""
    heads, rows, _ = choice.selected_HmC.shape
    given_HmC = choice.selected_HmC >= 0
    distance_HmC = (choice.own_m[:, None] - choice.selected_HmC).double()
    bucket_HmC = distance_HmC.log2().ceil().long().clamp(max=DISTANCES - 1)
    for head in range(heads):
        buckets = bucket_HmC[head][given_HmC[head]]
        found.distances[head] += buckets.bincount(minlength=DISTANCES).double().cpu()
    distinct_KmN = choice.selected_HmN.unflatten(0, (kv_heads, -1)).any(1)
    found.add(
        rows=heads * rows,
        selections=given_HmC.sum(),
        first_block=(choice.selected_HmC == choice.first_m[:, None]).any(-1).sum(),
        distinct=distinct_KmN.sum(),
    )
    for load_Hn in _loads(choice):
        found.add(
            heads=heads,
            load_imbalance=(load_Hn.amax(1) / load_Hn.mean(1)).nan_to_num(1.0).sum(),  # NaN: a head selects nothing
            never_selected=(load_Hn == 0).double().mean(1).sum(),
        )


def _loads(choice: _Choice) -> Iterator[Tensor]:
    """Yield, for each document, the number of selections by each head of each block that one of the queries could have
    selected, float64 [H, blocks]."""
    selected_HmN = choice.selected_HmN
    for first in choice.first_m.unique().tolist():
        rows_m = choice.first_m == first
        last = int(choice.own_m[rows_m].max())
        yield selected_HmN[:, rows_m, first:last].sum(1).double()


def distance_label(bucket: int) -> str:
    """Distances, in blocks, of a bucket of `GateStatistics.distances`, as text."""
    if bucket == 0:
        return "1"
    low, high = 2 ** (bucket - 1) + 1, 2**bucket
    if bucket == DISTANCES - 1:
        return f"{low}+"
    return str(high) if low == high else f"{low}-{high}"
