"""Rates at which a gate of mean keys misses the needle's block, head by head, against FlashMoBA's model of them.

The gate scores a block by the query's product with the block's mean key. Xiao et al. 2025 (arXiv:2511.11571, section 3)
model the products of a query with single keys as independent random variables: of one key, the needle's, with a mean
that is `separation` above that of all others, for queries and keys of length 1 whose other products have the variance
1 / d. The difference between the scores of the needle's block and of another block then has the mean separation / B and
the variance 2 / (d B), and the other block is scored higher with probability

    Phi(-separation * sqrt(d / (2 B)))         d head width, B block size, Phi the normal distribution function.

`rates` compares this with the rate that is observed, and drops the model's assumptions one after the other
(`MODELS`), which shows the one that fails. A gate misses the needle when as many other blocks as it has slots are
scored higher; `miss_rate` derives that rate from the same model.

Shape suffixes: n queries, S keys of the whole sequence, s keys of the history, H query heads, K key/value heads, D head
width, N history blocks, Z points of an integral; Y layers, G gates, F sums (`SUMS`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.observer import AttentionCall, Observer
from moba_train.config.base import Length, Section, format_count
from moba_train.config.evaluation import ATTENTION
from moba_train.evals.evaluation import EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.mechanisms.probes.probing import gathered, gathered_rows
from moba_train.model.build import observed_layers
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import sum_over_ranks
from moba_train.tools.needle.answers import Question, QuestionsByLength, answer_batch, padded_length
from moba_train.tools.needle.needle import NeedleTexts, text_problems
from moba_train.tools.needle.options import HiddenNeedles

MODELS = {
    "paper": "one key of the needle, products of all other keys with the variance 1 / d",
    "spread": "one key of the needle, the variance of the products as measured",
    "cluster": "all keys of the needle's block count, the variance of the products as measured",
    "scores": "mean and variance of the blocks' scores as measured; only their normal distribution is assumed",
}
"""The predictions, each with one assumption less than the one before."""


SUMS = (
    "queries",
    "separation",  # product with the needle's key, less the mean of all keys of other history blocks
    "key_variance",  # variance, over the keys of other blocks, of one query's products
    "score",  # score of the needle's block less the mean score of other blocks
    "score_squares",
    "score_variance",  # variance, over other blocks, of one query's scores
    "other_blocks",  # number of other history blocks
    "outranked",  # share of the other blocks that are scored higher; equal scores count half
    "missed",  # 1 if the needle's block is not selected
    "mass",  # full attention's probability of the needle's key
)
"""Sums over queries, float64 [F, H]. Products are those of queries of length 1 with keys whose root mean square length
is 1."""


class GateSize(Section):
    """A gate whose selection is measured, independent of the layers' attention."""

    block_size: Length = Field(512, description="tokens of a block")
    topk: int = Field(3, ge=2, description="blocks that a query attends to, the diagonal one included")

    @property
    def slots(self) -> int:
        """History blocks that it selects."""
        return self.topk - 1


def head_means(sums_FH: Tensor) -> list[dict[str, float]]:
    """Means over queries of each head; empty if no query had a choice."""
    queries_H = sums_FH[SUMS.index("queries")]
    if not queries_H.any():
        return []
    return [dict(zip(SUMS, values, strict=True)) for values in (sums_FH / queries_H).T.tolist()]


def rates(head: Mapping[str, float], size: GateSize, width: int) -> dict[str, float]:
    """`outranked` and `missed` of a head (`head_means`) as observed, and as each of the models predicts them:
    `outranked_paper`, ... width: of the head"""
    found = {"outranked": head["outranked"], "missed": head["missed"]}
    others = round(head["other_blocks"])
    for model in MODELS:
        distance, spread = _distance(model, head, size.block_size, width)
        found[f"outranked_{model}"] = outranked_rate(distance, spread)
        found[f"missed_{model}"] = miss_rate(distance, spread, others, size.slots)
    return found


def _distance(model: str, head: Mapping[str, float], size: int, width: int) -> tuple[float, float]:
    """Mean score of the needle's block above other blocks', and its standard deviation, both in units of the standard
    deviation of other blocks' scores."""
    tiny = 1e-30  # keys or scores that are all equal
    # The paper takes 1 / d for the variance of the other products (arXiv:2511.11571).
    if model == "paper":
        return head["separation"] * math.sqrt(width / size), 1.0
    if model == "spread":
        return head["separation"] / math.sqrt(max(head["key_variance"], tiny) * size), 1.0
    if model == "cluster":
        return head["score"] * math.sqrt(size / max(head["key_variance"], tiny)), 1.0
    deviation = math.sqrt(max(head["score_variance"], tiny))
    own = math.sqrt(max(head["score_squares"] - head["score"] ** 2, 0.0))
    return head["score"] / deviation, own / deviation


def needle_signal(
    q_nHD: Tensor, k_SKD: Tensor, tokens_n: Tensor, sources_n: Tensor, size: GateSize, scale: float
) -> Tensor:
    """Sums [F, H], on the CPU, over these queries of a sequence that begins with one document.

    q_nHD      queries, after the rotary embedding
    k_SKD      keys of the whole sequence, after it
    tokens_n   int64: the queries' tokens, of the first document
    sources_n  int64: for each query, the token that holds what it should find
    scale      of full attention's logits

    Blocks are those that MoBA's gate would choose from: complete ones before the query's own. A query counts if there
    are more of them than slots, and the source lies in one.
    """
    found = [torch.zeros(len(SUMS), q_nHD.shape[1], dtype=torch.float64, device=q_nHD.device)]
    for q_HD, token, source in zip(q_nHD, tokens_n.tolist(), sources_n.tolist(), strict=True):
        blocks = token // size.block_size
        if blocks > size.slots and source < blocks * size.block_size:
            found.append(_query_signal(q_HD, k_SKD[: token + 1], source, blocks, size, scale))
    return torch.stack(found).sum(0).cpu()


def _query_signal(q_HD: Tensor, k_sKD: Tensor, source: int, blocks: int, size: GateSize, scale: float) -> Tensor:
    """Sums of one query, which sees `k_sKD`: `blocks` complete blocks of history, and the keys after them."""
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
    values = {
        "queries": torch.ones_like(mean_H),
        "separation": products_HNB[:, at, inside] - mean_H,
        "key_variance": products_HNB[:, others].flatten(1).var(-1),
        "score": score_H,
        "score_squares": score_H.square(),
        # The variance of one value is NaN.
        "score_variance": scores_HN[:, others].var(-1) if blocks > 2 else torch.zeros_like(mean_H),
        "other_blocks": torch.full_like(mean_H, blocks - 1),
        "outranked": ((above_HN > 0).double() + 0.5 * (above_HN == 0)).mean(-1),
        "missed": (wins_HN.sum(-1) >= size.slots).double(),
        "mass": mass_H,
    }
    return torch.stack([values[name] for name in SUMS])


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
    # A sum over the needle's own score, z standard deviations from its mean: beyond 8 lies 1e-15 of the weight.
    z_Z = torch.linspace(-8, 8, 641, dtype=torch.float64)
    weight_Z = torch.exp(-(z_Z**2) / 2)
    higher_Z = torch.special.ndtr(-(distance + spread * z_Z)).clamp(1e-300, 1 - 1e-16)
    fewer_Z = torch.zeros_like(z_Z)
    for count in range(slots):
        # By logarithms, as binomials of thousands of blocks overflow; the clamp above keeps both logarithms finite.
        ways = math.lgamma(others + 1) - math.lgamma(count + 1) - math.lgamma(others - count + 1)
        fewer_Z += torch.exp(ways + count * higher_Z.log() + (others - count) * torch.log1p(-higher_Z))
    return float(((1 - fewer_Z).clamp(min=0) * weight_Z).sum() / weight_Z.sum())


class NeedleSignalConfig(HiddenNeedles):
    """Score of the needle's block above those of other blocks, and the rate at which a gate of mean keys misses it, for
    each head, compared with FlashMoBA's signal-to-noise model (arXiv:2511.11571). Needs parallel.tp and pp 1. See
    docs/how-to/evaluate.md."""

    attention: Literal["own", "both"] = ATTENTION
    gates: list[GateSize] = Field(
        [GateSize()],
        min_length=1,
        description="gates to measure, on the queries and keys of every layer, one head at a time",
    )


class NeedleSignalEvaluation(QuestionsByLength[NeedleSignalConfig]):
    """Rates at which gates miss the needle's block, observed and predicted. See docs/how-to/evaluate.md."""

    name = "needle_signal"
    Options = NeedleSignalConfig
    numbers = frozenset({"needle_missed", "needle_missed_predicted"})
    in_pipelines = False

    def __init__(self, options: NeedleSignalConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self._texts = NeedleTexts(options, setting, self.key)
        # A gate chooses when a document has more history than it selects.
        least = min(size.block_size * (size.topk + 1) for size in options.gates)
        self.choose_lengths(setting, self._texts.fits, self._texts.check, least)

    @classmethod
    def problems(cls, options: NeedleSignalConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Texts that cannot be made, or heads that are on several ranks."""
        yield from text_problems(options, setting, cls.key)
        if setting.tp > 1:
            yield f"{cls.key}: given with parallel.tp {setting.tp}, which has heads on several ranks; remove it"

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`needle_missed` and the rate predicted from the blocks' scores, means over layers and heads."""
        maps = {
            name: [self._measure(context, length, name) for length in self.lengths] for name in context.each_attention()
        }
        width = context.model.config.head_width
        rows = {name: [_rows(sums, self._options.gates, width) for sums in lengths] for name, lengths in maps.items()}
        own = [row for by_length in rows[context.own] for row in by_length]
        numbers = {"needle_missed": _mean(own, "missed"), "needle_missed_predicted": _mean(own, "missed_scores")}
        message = "no query was measured that has more history than the gates select"
        if own:
            message = (
                f"needle's block missed by {numbers['needle_missed']:.3f} of the heads with {context.own} attention, "
                f"{numbers['needle_missed_predicted']:.3f} predicted from the blocks' scores"
            )
        data = {
            "attention": context.own,
            "head_dim": width,
            "lengths": self.lengths,
            "gates": [size.model_dump() for size in self._options.gates],
            "samples": self._options.samples * len(self._options.depths),
            "rows": {name: dict(zip(map(str, self.lengths), found, strict=True)) for name, found in rows.items()},
        }
        table = [line for name, found in rows.items() for line in self._table(name, found)]
        return EvaluationResult(numbers, message, [*table, message], data)

    @torch.no_grad()
    def _measure(self, context: EvaluationContext, length: int, name: str) -> Tensor:
        """Sums [Y, G, F, H] with the model's present attention, equal on every rank."""
        shard, config = context.data_shard, context.model.config
        sums_YGFH = torch.zeros(config.layers, len(self._options.gates), len(SUMS), config.heads, dtype=torch.float64)
        questions = self._texts.questions(length)
        for index, counts in context.passes(len(questions), f"needle signal, {name}, {length}"):
            question = questions[index]
            batch = shard.shard_batch(answer_batch(question, padded_length(length, shard)))
            counted = sums_YGFH if counts else torch.zeros_like(sums_YGFH)
            observers = [_Look(context, question, self._options.gates, of_layer) for of_layer in counted]
            with observed_layers(context.model, shard.engine or LOCAL_ENGINE, observers):
                training_loss(context.model, batch.to(context.device))
        return torch.tensor(sum_over_ranks(sums_YGFH.flatten().tolist()), dtype=torch.float64).view_as(sums_YGFH)

    def _table(self, name: str, lengths: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
        """A line for each length and gate: means over layers and heads."""
        yield f"{f'missed, {name}':<32}" + "".join(f"{column:>10}" for column in ("observed", *MODELS))
        for length, rows in zip(self.lengths, lengths, strict=True):
            for size in self._options.gates:
                own = [row for row in rows if (row["block_size"], row["topk"]) == (size.block_size, size.topk)]
                if own:
                    title = f"{format_count(length, 1024)}, {size.block_size}/{size.topk}"
                    values = [_mean(own, key) for key in ("missed", *(f"missed_{model}" for model in MODELS))]
                    yield f"{title:<32}" + "".join(f"{value:>10.4f}" for value in values)


class _Look(Observer):
    """Adds to the sums of a layer, `sums_GFH`, at its first engine call, or its shard's attention to given blocks, over
    all ranks that share the sequence."""

    def __init__(
        self, context: EvaluationContext, question: Question, gates: Sequence[GateSize], sums_GFH: Tensor
    ) -> None:
        self._shard = context.data_shard
        self._scale = context.model.config.head_width**-0.5
        self._tokens_n = torch.tensor(question.places, device=context.device) - 1
        self._sources_n = torch.tensor(question.sources, device=context.device)
        self._gates = gates
        self._sums_GFH = sums_GFH
        self._seen = False

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Looks at the first call that is of the whole sequence or to blocks that the kind gives, for all heads: not
        for a part of them (by_group).

        The call's queries are gathered from the ranks, and its keys, if it has this rank's alone.
        """
        is_part = call.q_THD.shape[1] < self._sums_GFH.shape[-1]
        if self._seen or is_part or (call.has_all_keys and call.selected_HTC is None):
            return
        self._seen = True
        if not call.has_all_keys:
            whole = gathered(call.q_THD, (call.k_SKD,), self._tokens_n, call.layout, self._shard)
            if whole is not None:
                q_nHD, (k_SKD,) = whole
                self._add(q_nHD, k_SKD)
            return
        q_nHD = gathered_rows(call.q_THD, self._tokens_n, call.layout, self._shard)
        if self._shard.engine is None or not self._shard.engine.rank:
            self._add(q_nHD, call.k_SKD)

    def _add(self, q_nHD: Tensor, k_SKD: Tensor) -> None:
        for size, sums_FH in zip(self._gates, self._sums_GFH, strict=True):
            sums_FH += needle_signal(q_nHD, k_SKD, self._tokens_n, self._sources_n, size, self._scale)


def _rows(sums_YGFH: Tensor, gates: Sequence[GateSize], width: int) -> list[dict[str, Any]]:
    """A row for each layer, gate and head that had a choice."""
    return [
        _row({"layer": layer, "head": head, **size.model_dump()}, means, rates(means, size, width))
        for layer, sums_GFH in enumerate(sums_YGFH)
        for size, sums_FH in zip(gates, sums_GFH, strict=True)
        for head, means in enumerate(head_means(sums_FH))
    ]


def _row(place: dict[str, int], means: Mapping[str, float], found: Mapping[str, float]) -> dict[str, Any]:
    values = {
        "separation": means["separation"],
        "key_deviation": means["key_variance"] ** 0.5,
        "other_blocks": means["other_blocks"],
        "mass": means["mass"],
        **found,
    }
    return place | {name: float(f"{value:.6g}") for name, value in values.items()}


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Mean of one column; NaN without rows."""
    return sum(row[key] for row in rows) / len(rows) if rows else math.nan
