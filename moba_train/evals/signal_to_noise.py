"""Why a gate of mean keys finds a needle: the signal-to-noise model of FlashMoBA, and what it is compared with.

The gate scores a block by the query's product with the block's mean key. Xiao et al. 2025 (arXiv:2511.11571, section 3)
model the products of a query with single keys as independent random variables: of one key, the needle's, with a mean
that is `separation` above that of all others, for queries and keys of length 1 whose other products have the variance
1 / d. The difference between the scores of the needle's block and of another block then has the mean separation / B and
the variance 2 / (d B), and the other block is scored higher with probability

    Phi(-separation * sqrt(d / (2 B)))         d head width, B block size, Phi the normal distribution function.

`HeadSignal.rates` compares this with the rate that is observed, and drops the model's assumptions one after the other
(`MODELS`), so that the one that fails can be told. A gate misses the needle when as many other blocks as it has slots
are scored higher; `miss_rate` derives how often from the same model.

Shape suffixes: n queries, S keys of the whole sequence, s keys of the history, H query heads, K key/value heads, D head
width, N history blocks, Z points of an integral.
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moba_train.attention.masked import accumulation_dtype

MODELS = {
    "paper": "one key of the needle, products of all other keys with the variance 1 / d",
    "spread": "one key of the needle, the variance of the products as measured",
    "cluster": "all keys of the needle's block count, the variance of the products as measured",
    "scores": "mean and variance of the blocks' scores as measured; only their normal distribution is assumed",
}
"""The predictions, each with one assumption less than the one before."""


@dataclass(frozen=True)
class GateSize:
    """A gate whose blocks are looked at."""

    block_size: int
    topk: int
    """Blocks that a query attends to, its own included."""

    @property
    def slots(self) -> int:
        """History blocks that it selects."""
        return self.topk - 1


@dataclass
class NeedleSignal:
    """Sums over queries for each query head of a layer, float64 [H].

    Products are those of queries of length 1 with keys whose root mean square length is 1.
    """

    queries: Tensor
    separation: Tensor
    """Product with the needle's key, less the mean of all keys of other history blocks."""
    key_variance: Tensor
    """Variance, over the keys of other blocks, of one query's products."""
    score: Tensor
    """Score of the needle's block less the mean score of other blocks."""
    score_squares: Tensor
    score_variance: Tensor
    """Variance, over other blocks, of one query's scores."""
    other_blocks: Tensor
    """Number of other history blocks."""
    outranked: Tensor
    """Share of the other blocks that are scored higher; equal scores count half."""
    missed: Tensor
    """Whether the needle's block is not selected."""
    mass: Tensor
    """Full attention's probability of the needle's key."""

    @classmethod
    def zeros(cls, heads: int) -> "NeedleSignal":
        """The sums of no query: zeros, for so many heads."""
        return cls(*(torch.zeros(heads, dtype=torch.float64) for _ in fields(cls)))

    @classmethod
    def from_vector(cls, values: list[float]) -> "NeedleSignal":
        """The inverse of `vector`."""
        names = fields(cls)
        return cls(*torch.tensor(values, dtype=torch.float64).view(len(names), -1))

    def vector(self) -> list[float]:
        """All sums in a fixed order, for an all-reduce."""
        return [value for one in fields(self) for value in getattr(self, one.name).tolist()]

    def __add__(self, other: "NeedleSignal") -> "NeedleSignal":
        return NeedleSignal(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def heads(self, size: GateSize, head_dim: int) -> list["HeadSignal"]:
        """Each head's means; empty where no query had a choice."""
        if not self.queries.any():
            return []
        means = {one.name: (getattr(self, one.name) / self.queries).tolist() for one in fields(self)}
        return [
            HeadSignal(size, head_dim, **{name: values[head] for name, values in means.items() if name != "queries"})
            for head in range(len(self.queries))
        ]


@dataclass(frozen=True)
class HeadSignal:
    """One head's means over queries (`NeedleSignal`)."""

    size: GateSize
    head_dim: int
    separation: float
    key_variance: float
    score: float
    score_squares: float
    score_variance: float
    other_blocks: float
    outranked: float
    missed: float
    mass: float

    def rates(self) -> dict[str, float]:
        """`outranked` and `missed` as observed, and as each of the models predicts: `outranked_paper`, ..."""
        found = {"outranked": self.outranked, "missed": self.missed}
        others = round(self.other_blocks)
        for model in MODELS:
            distance, spread = self._distance(model)
            found[f"outranked_{model}"] = outranked_rate(distance, spread)
            found[f"missed_{model}"] = miss_rate(distance, spread, others, self.size.slots)
        return found

    def _distance(self, model: str) -> tuple[float, float]:
        """Mean score of the needle's block above other blocks', and its standard deviation, both in units of the
        standard deviation of other blocks' scores."""
        size, width = self.size.block_size, self.head_dim
        tiny = 1e-30  # keys or scores that are all equal
        if model == "paper":
            return self.separation * math.sqrt(width / size), 1.0
        if model == "spread":
            return self.separation / math.sqrt(max(self.key_variance, tiny) * size), 1.0
        if model == "cluster":
            return self.score * math.sqrt(size / max(self.key_variance, tiny)), 1.0
        deviation = math.sqrt(max(self.score_variance, tiny))
        own = math.sqrt(max(self.score_squares - self.score**2, 0.0))
        return self.score / deviation, own / deviation


def needle_signal(
    q_nHD: Tensor, k_SKD: Tensor, tokens_n: Tensor, sources_n: Tensor, size: GateSize, scale: float
) -> NeedleSignal:
    """The sums over these queries of a sequence that begins with one document.

    q_nHD      queries, after the rotary embedding
    k_SKD      keys of the whole sequence, after it
    tokens_n   int64: the queries' tokens, of the first document
    sources_n  int64: for each query, the token that holds what it should find
    scale      of full attention's logits

    Blocks are those that MoBA's gate would choose from, complete ones before the query's own. A query counts where
    there are more of them than slots, and the source lies in one.
    """
    found = []
    for q_HD, token, source in zip(q_nHD, tokens_n.tolist(), sources_n.tolist(), strict=True):
        blocks = token // size.block_size
        if blocks > size.slots and source < blocks * size.block_size:
            signal = _query_signal(q_HD, k_SKD[: token + 1], source, blocks, size, scale)
            found.append(torch.stack([getattr(signal, one.name) for one in fields(signal)]))
    # One copy from the device for all queries.
    return NeedleSignal(*torch.stack(found).sum(0).cpu()) if found else NeedleSignal.zeros(q_nHD.shape[1])


def _query_signal(q_HD: Tensor, k_sKD: Tensor, source: int, blocks: int, size: GateSize, scale: float) -> NeedleSignal:
    """One query, which sees `k_sKD`, of them `blocks` complete blocks of history."""
    dtype = accumulation_dtype(q_HD.dtype)
    q_KGD = q_HD.to(dtype).unflatten(0, (k_sKD.shape[1], -1))
    products_Hs = (q_KGD @ k_sKD.to(dtype).permute(1, 2, 0)).flatten(0, 1).double()
    mass_H = (products_Hs * scale).softmax(-1)[:, source]
    history = blocks * size.block_size
    key_length_K = k_sKD[:history].double().square().sum(-1).mean(0).sqrt()
    length_H = q_HD.double().norm(dim=-1) * key_length_K.repeat_interleave(q_KGD.shape[1])
    products_HNB = (products_Hs[:, :history] / length_H.clamp(min=1e-30)[:, None]).unflatten(1, (blocks, -1))
    scores_HN = products_HNB.mean(-1)
    at, inside = divmod(source, size.block_size)
    others = torch.arange(blocks, device=q_HD.device) != at
    mean_H = scores_HN[:, others].mean(-1)
    above_HN = scores_HN[:, others] - scores_HN[:, at, None]
    # Of equal gates the lower block id wins.
    wins_HN = (above_HN > 0) | ((above_HN == 0) & (torch.arange(blocks - 1, device=q_HD.device) < at))
    score_H = scores_HN[:, at] - mean_H
    return NeedleSignal(
        queries=torch.ones_like(mean_H),
        separation=products_HNB[:, at, inside] - mean_H,
        key_variance=products_HNB[:, others].flatten(1).var(-1),
        score=score_H,
        score_squares=score_H.square(),
        score_variance=scores_HN[:, others].var(-1) if blocks > 2 else torch.zeros_like(mean_H),
        other_blocks=torch.full_like(mean_H, blocks - 1),
        outranked=((above_HN > 0).double() + 0.5 * (above_HN == 0)).mean(-1),
        missed=(wins_HN.sum(-1) >= size.slots).double(),
        mass=mass_H,
    )


def outranked_rate(distance: float, spread: float = 1.0) -> float:
    """Probability that one other block, of a standard normal score, is scored higher than the needle's, whose score is
    normal with the mean `distance` and the standard deviation `spread`."""
    return 0.5 * math.erfc(distance / math.sqrt(2 * (1 + spread**2)))


def miss_rate(distance: float, spread: float, others: int, slots: int) -> float:
    """Probability that at least `slots` of `others` independent blocks are scored higher than the needle's.

    Given the needle's score, the number of higher ones is binomial; this is integrated over the score's distribution.
    With one other block and one slot it is `outranked_rate`.
    """
    if slots > others:
        return 0.0
    z_Z = torch.linspace(-8, 8, 641, dtype=torch.float64)
    weight_Z = torch.exp(-(z_Z**2) / 2)
    higher_Z = torch.special.ndtr(-(distance + spread * z_Z)).clamp(1e-300, 1 - 1e-16)
    fewer_Z = torch.zeros_like(z_Z)
    for count in range(slots):
        ways = math.lgamma(others + 1) - math.lgamma(count + 1) - math.lgamma(others - count + 1)
        fewer_Z += torch.exp(ways + count * higher_Z.log() + (others - count) * torch.log1p(-higher_Z))
    return float(((1 - fewer_Z).clamp(min=0) * weight_Z).sum() / weight_Z.sum())
