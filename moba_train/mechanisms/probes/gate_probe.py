"""Gate probes: the blocks that the gate of every sparse layer selects, compared with full attention's probability."""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.facets import SelectedBlocks
from moba_train.attention.layout import Layout, TokenRange, joined_ranges
from moba_train.attention.observer import AttentionCall, StatisticsObserver
from moba_train.attention.statistics import Statistics, joined
from moba_train.config.base import MOST_SAMPLES, Section
from moba_train.config.evaluation import EVERY
from moba_train.data.batch import Batch, collate
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.mechanisms.probes.gate_statistics import (
    DISTANCES,
    MEANS,
    GateStatistics,
    distance_label,
    gate_statistics,
)
from moba_train.mechanisms.probes.probing import gathered, gathered_rows
from moba_train.model.build import observed_layers
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import training_loss
from moba_train.parallel.world import gather_over_ranks, sum_over_ranks


class GateProbeConfig(Section):
    """Blocks that the gates of sparse layers select, compared with full attention on a sample of queries. See
    docs/how-to/evaluate.md."""

    not_here = {"layers": "gone: every sparse layer is probed"}

    queries: int = Field(256, ge=1, description="sampled queries of a sequence, all heads of them")
    sequences: int = Field(1, ge=1, le=MOST_SAMPLES, description="validation sequences of the stage's length")
    by_head: bool = Field(
        False,
        description="also keep how far each head's selected blocks are (head_distance_share); needs parallel.tp 1",
    )
    every: int | None = EVERY


class GateProbe(Evaluation[GateProbeConfig]):
    """Gate probes of the stage's own attention on sampled queries of validation sequences. See docs/how-to/evaluate.md.

    A probe of the 13 sparse layers of a 1B model at 8K tokens takes 0.18 s on an H200
    (benchmarks/results/probe-cost-h200.json).
    """

    name = "gate_probe"
    Options = GateProbeConfig
    numbers = frozenset({"mass_recall", "block_recall", "attention_error"})

    def __init__(self, options: GateProbeConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        stage = setting.stage
        self._queries = min(options.queries, stage.seq_len)
        self._seed = setting.seed
        self._data = setting.validation_data(options.sequences)
        if all(layer.kind == "full" for layer in stage.attention):
            self.missing = (
                f"all layers of stage {stage.name!r} have full attention, so there is no gate to probe; `moba-train "
                f"eval` can probe another attention, such as stages.{stage.index}.attention.default=moba"
            )

    @classmethod
    def problems(cls, options: GateProbeConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No sequences to probe on, or heads that are on several ranks."""
        if not setting.validation:
            yield f"{cls.key}: needs sequences to probe on; set data.validation, or remove it"
        if options.by_head and setting.tp > 1:
            yield f"{cls.key}.by_head: given true, which parallel.tp {setting.tp} cannot do; set it to false"

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`mass_recall`, `block_recall` and `attention_error`: means over the layers that choose."""
        began = time.perf_counter()
        for name in context.each_attention():
            if name == context.own:
                gates, shown = self._probe(context)
        seconds = time.perf_counter() - began
        found = summarize(context.own, gates, self._queries * self._data.sequences, seconds, self._options.by_head)
        found.data["attention_statistics"] = [layer.values for layer in shown]
        return found

    @torch.no_grad()
    def _probe(self, context: EvaluationContext) -> tuple[dict[int, GateStatistics], list[Statistics]]:
        """Gates of the layers, and statistics of the attention of every layer; equal on every rank."""
        shard = context.data_shard
        engine = shard.engine or LOCAL_ENGINE
        model = context.model.config
        probes = [LayerProbe(shard, model.heads // shard.tp_size) for _ in range(model.layers)]
        with observed_layers(context.model, engine, probes):
            for index, counts in context.passes(self._data.sequences, "gate probe"):
                whole = collate([self._data.sample(index)])
                tokens = self._sample(whole, index) if counts else ()
                for probe in probes:
                    probe.tokens = tokens
                training_loss(context.model, shard.shard_batch(whole).to(context.device))
        vectors = sum_over_ranks([value for probe in probes for value in probe.found.vector()])
        width = len(GateStatistics.of_heads(model.heads // shard.tp_size).vector())
        summed = [GateStatistics.from_vector(vectors[at : at + width]) for at in range(0, len(vectors), width)]
        gates = dict(enumerate(summed))
        by_rank = gather_over_ranks([probe.statistics for probe in probes])
        return gates, [joined(layer) for layer in zip(*by_rank, strict=True)]

    def _sample(self, whole: Batch, index: int) -> Sequence[int]:
        """Tokens of the sequence whose queries are sampled: ascending, one in each of equal parts."""
        edges = np.linspace(0, len(whole.tokens), self._queries + 1).astype(np.int64)
        draw = np.random.default_rng([self._seed, index])
        return [int(draw.integers(start, stop)) for start, stop in pairwise(edges)]


class LayerProbe(StatisticsObserver):
    """Sees one layer's attention, and what its gate selects for the sampled queries."""

    def __init__(self, shard: DataShard, heads: int) -> None:
        super().__init__()
        self._data_shard = shard
        self.found = GateStatistics.of_heads(heads)
        self.tokens: Sequence[int] = ()
        """Tokens of the sequence whose queries are sampled, ascending."""

    def attended(self, call: AttentionCall, out_THD: Tensor, lse_HT: Tensor) -> None:
        """Looks at the blocks that the attention's gate selects, or those that the kind gives it."""
        if call.q_THD.shape[1] < len(self.found.distances):
            pass  # a part of the layer's heads (by_group), as if nothing were seen
        elif not call.has_all_keys:
            self._add(_statistics(call, self.tokens, self._data_shard))
        elif call.selected_HTC is not None:
            self._add(given_statistics(call, self.tokens, self._data_shard))
        super().attended(call, out_THD, lse_HT)

    def _add(self, found: GateStatistics) -> None:
        """Add the statistics of a call, and record that there was one on the first rank of those that share it."""
        self.found += found
        if self._data_shard.engine is None or not self._data_shard.engine.rank:
            self.found.sums["seen"] = 1.0


def _statistics(call: AttentionCall, tokens: Sequence[int], shard: DataShard) -> GateStatistics:
    """The statistics of the queries of `tokens` to all keys of the sequence; counted once by ranks that share it."""
    tokens_n = torch.tensor(tokens, dtype=torch.int64, device=call.q_THD.device)
    found = gathered(call.q_THD, (call.k_SKD, call.v_SKD), tokens_n, call.layout, shard)
    if found is None or not tokens:
        return GateStatistics.of_heads(call.q_THD.shape[1])
    q_nHD, (k_SKD, v_SKD) = found
    return gate_statistics(q_nHD, k_SKD, v_SKD, call.attention, _layout_of(tokens, call.layout))


def given_statistics(call: AttentionCall, tokens: Sequence[int], shard: DataShard) -> GateStatistics:
    """The statistics of the queries of `tokens`, given the blocks that this rank's queries select; counted once by
    ranks that share the sequence."""
    assert call.selected_HTC is not None
    tokens_n = torch.tensor(tokens, dtype=torch.int64, device=call.q_THD.device)
    q_nHD = gathered_rows(call.q_THD, tokens_n, call.layout, shard)
    # Rows of other ranks are zeros in the sum: the ids begin at 1 in it.
    ids_nHC = gathered_rows(call.selected_HTC.transpose(0, 1) + 1, tokens_n, call.layout, shard)
    if not tokens or (shard.engine is not None and shard.engine.rank):
        return GateStatistics.of_heads(q_nHD.shape[1])
    ids_HnC = (ids_nHC.to(torch.int32) - 1).transpose(0, 1)
    ids_HnC = ids_HnC.repeat_interleave(q_nHD.shape[1] // len(ids_HnC), 0)  # of groups of heads, if there are fewer
    selected = SelectedBlocks(ids_HnC, call.attention.facts.alignment)
    return gate_statistics(q_nHD, call.k_SKD, call.v_SKD, call.attention, _layout_of(tokens, call.layout), selected)


def _layout_of(tokens: Sequence[int], layout: Layout) -> Layout:
    """The layout of these queries and all keys."""
    return layout.part(joined_ranges(TokenRange(token, token + 1) for token in tokens), None)


def summarize(
    own: str, layers: dict[int, GateStatistics], queries: int, seconds: float, by_head: bool
) -> EvaluationResult:
    """Result of probing these layers, whose attention is called `own`; `by_head` adds each head's distances.

    If no query has a choice, everything is attended to, and the numbers say so. They are NaN if a layer's kind shows no
    selection.
    """
    means = {layer: found for layer, one in layers.items() if (found := one.means())}
    unseen = [layer for layer, one in layers.items() if not one.sums.get("seen")]

    def mean(name: str, of_everything: float) -> float:
        if not means:
            return math.nan if unseen else of_everything
        return sum(one[name] for one in means.values()) / len(means)

    numbers = {"mass_recall": mean("mass_recall", 1.0), "block_recall": mean("block_recall", 1.0)}
    numbers["attention_error"] = mean("output_error", 0.0)
    message = (
        f"{own} gates of {len(means)} layers: {numbers['mass_recall']:.3f} of full attention's probability in the "
        f"blocks attended to, {numbers['block_recall']:.3f} of the best blocks selected, output off by "
        f"{numbers['attention_error']:.3f}"
    )
    if not means:
        message = f"{own} gates: no query has more history than its layer attends to"
        if unseen:
            message = f"{own} gates: nothing is measured, the kinds of {len(unseen)} layers select nothing that is seen"
    data = {
        "attention": own,
        "queries": queries,
        "seconds": seconds,
        "distances": [distance_label(bucket) for bucket in range(DISTANCES)],
        "layers": [
            {"layer": layer, **found, **_distance_shares(layers[layer].distances, by_head)}
            for layer, found in means.items()
        ],
    }
    return EvaluationResult(numbers, message, [*(_table(means) if means else ()), message], data)


def _distance_shares(distances_HX: Tensor, by_head: bool) -> dict[str, list[float] | list[list[float]]]:
    """Selections by distance, as shares of all selections and of each head's; zeros for a head without any."""
    layer_X = distances_HX.sum(0)
    shares = {"distance_share": (layer_X / layer_X.sum()).tolist()}
    if not by_head:
        return shares
    return shares | {"head_distance_share": (distances_HX / distances_HX.sum(1, keepdim=True)).nan_to_num(0.0).tolist()}


def _table(means: dict[int, dict[str, float]]) -> list[str]:
    """A line for each layer."""
    names = list(MEANS)
    lines = [f"{'layer':<8}" + "".join(f"{name:>20}" for name in names)]
    return lines + [f"{layer:<8}" + "".join(_cell(one.get(name)) for name in names) for layer, one in means.items()]


def _cell(value: float | None) -> str:
    """Cell of a statistic, which not every kind of gate has."""
    return f"{'–' if value is None else format(value, '.4f'):>20}"
