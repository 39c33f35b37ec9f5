"""How far a gate tells the needle's block from all others, head by head, against the signal-to-noise model."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.attention.shard import ShardCall
from moba_train.config.quantities import format_count
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.evals.answers import Question, answer_batch, padded_length
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult
from moba_train.evals.lengths import stage_lengths
from moba_train.evals.needle import NeedleTexts, text_problems
from moba_train.evals.probing import gathered, gathered_rows, probing
from moba_train.evals.signal_to_noise import MODELS, GateSize, HeadSignal, NeedleSignal, needle_signal
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import sum_over_ranks

Signals = dict[tuple[int, GateSize], NeedleSignal]
"""By layer and gate."""


class NeedleSignalEvaluation(Evaluation):
    """Rates at which gates miss the needle's block, observed and predicted. See docs/retrieval.md."""

    name = "needle_signal"
    key = "evaluation.needle_signal"
    numbers = frozenset({"needle_missed", "needle_missed_predicted"})

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        wanted = config.evaluation.needle_signal
        assert wanted is not None
        self.every = wanted.every or config.evaluation.every
        self.compare_with_full = wanted.attention == "both"
        self._wanted = wanted
        self._sizes = [GateSize(size.block_size, size.topk) for size in wanted.gates]
        self._texts = NeedleTexts(config, wanted, self.key)
        # A gate chooses where a document has more history than it selects.
        least = min(size.block_size * (size.topk + 1) for size in self._sizes)
        self._lengths = [length for length in stage_lengths(wanted, stage) if length > least]
        if wanted.lengths is None:
            self._lengths = [length for length in self._lengths if self._texts.fits(length)]
        if not self._lengths:
            self.missing = f"{self.key}.lengths: none is at most the stage's seq_len {stage.seq_len} and above {least}"

    @classmethod
    def enabled(cls, config: RunConfig) -> bool:
        """Where the recipe has the section."""
        return config.evaluation.needle_signal is not None

    @classmethod
    def problems(cls, config: RunConfig) -> Iterator[str]:
        """Texts that cannot be made, or heads that are on several ranks."""
        wanted = config.evaluation.needle_signal
        if wanted is None:
            return
        yield from text_problems(config, wanted, cls.key)
        if config.parallel.tp > 1:
            yield f"{cls.key}: given with parallel.tp {config.parallel.tp}, which has heads on several ranks; remove it"

    @classmethod
    def check_samples(cls, config: RunConfig, stage: Stage) -> None:
        """Raises DataError for lengths that leave no room for the needles, and for too little text around them."""
        signal = cls(config, stage)
        for length in signal._lengths:
            signal._texts.check(length)

    @classmethod
    def sequences_per_pass(cls, stage: Stage) -> int:
        """One."""
        return 1

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`needle_missed` and what the model predicts from the blocks' scores, means over layers and heads."""
        maps = {
            name: [self._measure(context, length, name) for length in self._lengths]
            for name in context.each_attention()
        }
        width = context.model.config.head_width
        rates = {name: [_rates(found, width) for found in lengths] for name, lengths in maps.items()}
        own = [row for by_length in rates[context.own] for row in by_length]
        numbers = {"needle_missed": _mean(own, "missed"), "needle_missed_predicted": _mean(own, "missed_scores")}
        message = "no query of any layer was seen that has more history than the gates select"
        if own:
            message = (
                f"needle's block missed by {numbers['needle_missed']:.3f} of the heads with {context.own} attention, "
                f"{numbers['needle_missed_predicted']:.3f} predicted from the blocks' scores"
            )
        data = {
            "attention": context.own,
            "head_dim": width,
            "lengths": self._lengths,
            "gates": [{"block_size": size.block_size, "topk": size.topk} for size in self._sizes],
            "samples": self._wanted.samples * len(self._wanted.depths),
            "seed": self._wanted.seed,
            "rows": {name: dict(zip(map(str, self._lengths), found, strict=True)) for name, found in rates.items()},
        }
        table = [line for name, found in rates.items() for line in self._table(name, found)]
        return EvaluationResult(numbers, message, [*table, message], data)

    @torch.no_grad()
    def _measure(self, context: EvaluationContext, length: int, name: str) -> Signals:
        """The sums of every layer with the model's present attention, equal on every rank."""
        shard, config = context.data_shard, context.model.config
        layers = range(config.layers)
        found = {key: NeedleSignal.zeros(config.heads) for key in product(layers, self._sizes)}
        questions = self._texts.questions(length)
        for first in context.track(range(0, len(questions), shard.dp_size), f"needle signal, {name}, {length}"):
            context.between_batches()
            index = first + shard.dp_rank
            question = questions[min(index, len(questions) - 1)]
            batch = shard.shard_batch(answer_batch(question, padded_length(length, shard)))
            look = _Look(context, question, found, self._sizes, counts=index < len(questions))
            with probing(context.model, layers, look, look.at_shard, shard):
                training_loss(context.model, batch.to(context.device))
        vectors = sum_over_ranks([value for one in found.values() for value in one.vector()])
        width = len(vectors) // len(found)
        summed = [NeedleSignal.from_vector(vectors[at : at + width]) for at in range(0, len(vectors), width)]
        return dict(zip(found, summed, strict=True))

    def _table(self, name: str, lengths: Sequence[list[dict[str, Any]]]) -> Iterator[str]:
        """A line for each length and gate: means over layers and heads."""
        yield f"{f'missed, {name}':<32}" + "".join(f"{column:>10}" for column in ("observed", *MODELS))
        for length, rows in zip(self._lengths, lengths, strict=True):
            for size in self._sizes:
                own = [row for row in rows if (row["block_size"], row["topk"]) == (size.block_size, size.topk)]
                if own:
                    title = f"{format_count(length, 1024)}, {size.block_size}/{size.topk}"
                    values = [_mean(own, key) for key in ("missed", *(f"missed_{model}" for model in MODELS))]
                    yield f"{title:<32}" + "".join(f"{value:>10.4f}" for value in values)


class _Look:
    """Adds to the sums at the first engine call of every layer, or at its shard's attention to given blocks, over all
    ranks that share the sequence."""

    def __init__(
        self,
        context: EvaluationContext,
        question: Question,
        found: Signals,
        sizes: Sequence[GateSize],
        counts: bool,
    ) -> None:
        self._shard = context.data_shard
        self._scale = context.model.config.head_width**-0.5
        self._tokens_n = torch.tensor(question.places, device=context.device) - 1
        self._sources_n = torch.tensor(question.sources, device=context.device)
        self._found = found
        self._sizes = sizes
        self._counts = counts
        self._seen: set[int] = set()

    def __call__(
        self, layer: int, q_LHD: Tensor, k_LKD: Tensor, _v: Tensor, _attention: LocalAttention, layout: Layout
    ) -> None:
        if layer in self._seen:
            return
        self._seen.add(layer)
        whole = gathered(q_LHD, (k_LKD,), self._tokens_n, layout, self._shard)
        if whole is not None:
            q_nHD, (k_SKD,) = whole
            self._add(layer, q_nHD, k_SKD)

    def at_shard(self, layer: int, call: ShardCall) -> None:
        """Adds to the sums at the layer's first attention of a shard. Its queries [n, H, D] are gathered from the
        ranks, its keys [S, K, D] are those of the whole sequence on every rank."""
        if layer in self._seen:
            return
        self._seen.add(layer)
        q_nHD = gathered_rows(call.q_nHD, self._tokens_n, call.layout, self._shard)
        if self._shard.engine is None or not self._shard.engine.rank:
            self._add(layer, q_nHD, call.k_TKD)

    def _add(self, layer: int, q_nHD: Tensor, k_SKD: Tensor) -> None:
        if not self._counts:
            return
        for size in self._sizes:
            signal = needle_signal(q_nHD, k_SKD, self._tokens_n, self._sources_n, size, self._scale)
            self._found[layer, size] = self._found[layer, size] + signal


def _rates(found: Mapping[tuple[int, GateSize], NeedleSignal], width: int) -> list[dict[str, Any]]:
    """A row for each layer, gate and head that had a choice."""
    return [
        _row(layer, size, head, signal)
        for (layer, size), sums in found.items()
        for head, signal in enumerate(sums.heads(size, width))
    ]


def _row(layer: int, size: GateSize, head: int, signal: HeadSignal) -> dict[str, Any]:
    values = {
        "separation": signal.separation,
        "key_deviation": signal.key_variance**0.5,
        "other_blocks": signal.other_blocks,
        "mass": signal.mass,
        **signal.rates(),
    }
    place = {"layer": layer, "head": head, "block_size": size.block_size, "topk": size.topk}
    return place | {name: float(f"{value:.6g}") for name, value in values.items()}


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """The mean of one column; NaN without rows."""
    return sum(row[key] for row in rows) / len(rows) if rows else math.nan
