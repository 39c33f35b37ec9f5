"""Gradient reach: the tokens before a loss token that the gradient of the loss gets to, layer by layer.

In SFT few tokens carry loss, and the hidden states of all others get their gradient through attention alone. In a MoBA
layer only the tokens of selected blocks get any, which is why SFT keeps the last layers full (Lu et al. 2025,
arXiv:2502.13189, section 3.2). Statistics are by the distance to the loss token that the gradient comes from.

Shape suffixes: L layers, T tokens of a micro-batch, R rows of this rank's shard, B buckets of distance.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn

from moba_train.config.base import MOST_SAMPLES, Section
from moba_train.config.evaluation import ATTENTION, EVERY
from moba_train.data.batch import Batch, collate
from moba_train.data.indexed import corpus_file
from moba_train.data.loss_mask import mask_prefix
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult, EvaluationSetting
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import training_loss

DISTANCES = 24
"""Buckets of distance in tokens: 0, 1, 2, 3-4, 5-8, ..., the last one open (from 2M on)."""
THRESHOLD = 1e-3
"""A token counts as reached when its gradient norm is above this fraction of the mean norm of all context tokens."""


def distance_buckets(batch: Batch) -> Tensor:
    """Bucket of each token of a whole micro-batch, int64 [T] on the CPU, by its distance to the nearest loss token at
    or after it in its document. 0: it carries loss itself; above 0: it is context; -1: no loss token follows."""
    total = len(batch.tokens)
    places_T = torch.arange(total)
    next_T = torch.full((total,), total)
    index_n = batch.loss_index[batch.loss_weight != 0]
    next_T[index_n] = index_n
    next_T = next_T.flip(0).cummin(0).values.flip(0)
    ends_T = batch.layout.cu_seqlens.long()[1:][batch.layout.documents(places_T)]
    edges = torch.tensor([0, *(2**power for power in range(DISTANCES - 2))])
    return torch.where(next_T < ends_T, torch.bucketize(next_T - places_T, edges), -1)


def distance_label(bucket: int) -> str:
    """Distances, in tokens, of a bucket, as text."""
    if bucket < 3:
        return str(bucket)
    low = 2 ** (bucket - 2) + 1
    return f"{low}+" if bucket == DISTANCES - 1 else f"{low}-{2 ** (bucket - 1)}"


@dataclass(frozen=True)
class ObservedGradients:
    """Gradient norms of one sequence, on one rank."""

    norms_LR: Tensor
    """L2 norm of the gradient of each row of each layer's input, float32 or float64."""
    buckets_R: Tensor
    """int64: the bucket of each row's token, -1 also for padding."""

    def by_bucket(self, values_LR: Tensor) -> Tensor:
        """Sums of `values_LR` over the rows of each bucket, float64 [L, B]."""
        members_RB = self.buckets_R[:, None] == torch.arange(DISTANCES, device=self.buckets_R.device)
        return values_LR.double() @ members_RB.double()


@dataclass(frozen=True)
class ReachStatistics:
    """Sums over the tokens of each layer and distance, float64 [L, B] on the CPU, over all sequences and ranks."""

    tokens: Tensor
    """Numbers of tokens."""
    norms: Tensor
    """Sums of gradient norms."""
    zeros: Tensor
    """Numbers of tokens whose gradient is exactly 0."""
    reached: Tensor
    """Numbers of tokens whose gradient norm is above `THRESHOLD` times the mean of all context tokens of the layer."""

    @property
    def reach(self) -> Tensor:
        """Share of the context tokens that are reached, [L]."""
        return self.reached[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)

    @property
    def zero_share(self) -> Tensor:
        """Share of the context tokens whose gradient is exactly 0, [L]."""
        return self.zeros[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)

    @property
    def context_norm(self) -> Tensor:
        """Mean gradient norm of the context tokens over that of the loss tokens, [L]."""
        context = self.norms[:, 1:].sum(1) / self.tokens[:, 1:].sum(1)
        return context / (self.norms[:, 0] / self.tokens[:, 0])

    @property
    def mass(self) -> Tensor:
        """Share of the context's summed gradient norms in each bucket, [L, B]; 0 in bucket 0 and without any norm."""
        context = self.norms.clone()
        context[:, 0] = 0
        return context / context.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def context_thresholds(tokens_LB: Tensor, norms_LB: Tensor) -> Tensor:
    """Norm above which a token counts as reached, [L, 1]."""
    return THRESHOLD * norms_LB[:, 1:].sum(1, keepdim=True) / tokens_LB[:, 1:].sum(1, keepdim=True)


NO_CONTEXT = "has no token without loss before one with loss (in the corpora's masks), so there is no context to reach"


class GradientReachConfig(Section):
    """Norm of the loss' gradient at every layer's input, by distance to the loss token it comes from: it shows which
    tokens a sparse loss mask, as in SFT, trains through attention. Needs parallel.pp 1. See docs/how-to/evaluate.md."""

    sequences: int = Field(
        4, ge=1, le=MOST_SAMPLES, description="validation sequences of the stage's length, with their loss masks"
    )
    every: int | None = EVERY
    attention: Literal["own", "both"] = ATTENTION


class GradientReach(Evaluation[GradientReachConfig]):
    """Norm of the loss' gradient at every layer's input, by distance to the loss token. See docs/how-to/evaluate.md."""

    name = "gradient_reach"
    Options = GradientReachConfig
    data_name = "gradient_reach_layers"
    numbers = frozenset({"gradient_reach", "gradient_reach_last"})
    numbers_against_full = frozenset({"gradient_reach_full", "gradient_reach_last_full"})
    in_pipelines = False

    def __init__(self, options: GradientReachConfig, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self._data = setting.validation_data(options.sequences)
        batches = [collate([self._data.sample(index)]) for index in range(options.sequences)]
        self._loss_weight = sum(batch.loss_weight_sum for batch in batches)
        if not any((distance_buckets(batch) > 0).any() for batch in batches):
            self.missing = f"data.validation {NO_CONTEXT}"

    @classmethod
    def problems(cls, options: GradientReachConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No sequences to measure on."""
        if not setting.validation:
            yield f"{cls.key}: needs sequences to measure on; set data.validation, or remove it"

    @classmethod
    def data_problems(cls, options: GradientReachConfig, setting: EvaluationSetting) -> Iterator[str]:
        """No corpus with a loss mask: every token carries loss, and none is context alone."""
        masks = (corpus_file(mask_prefix(source.path), "idx") for source in setting.validation)
        if not any(mask.is_file() for mask in masks):
            yield f"data.validation {NO_CONTEXT}; hold out documents with loss masks"

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`gradient_reach` and `gradient_reach_last`, also with full attention if that is tried."""
        found = {name: self._measure(context) for name in context.each_attention()}
        return summarize(found, context.own, self._data.sequences)

    def _measure(self, context: EvaluationContext) -> ReachStatistics:
        """The statistics of the model's current attention, equal on every rank."""
        shard = context.data_shard
        observed = []
        for index, counts in context.passes(self._data.sequences, "gradient reach"):
            whole = collate([self._data.sample(index)])
            batch = shard.shard_batch(whole).to(context.device)
            norms_LR = input_gradient_norms(context.model, batch, self._loss_weight)
            if counts:
                buckets_R = _own_rows(distance_buckets(whole), batch, norms_LR.shape[1], shard)
                observed.append(ObservedGradients(norms_LR, buckets_R.to(context.device)))
        return reach_statistics(observed, context.model.config.layers, context.device)


def input_gradient_norms(model: Transformer, batch: Batch, loss_weight: float) -> Tensor:
    """L2 norms of the gradient of (loss sum / `loss_weight`) with respect to every layer's input hidden states.

    [layers, rows of this rank], float32 (float64 for float64). Called on all ranks together, which share one sequence
    or have different ones. Parameters get no gradient, and no weight gradient is computed. Compiled layers run
    uncompiled, because their hooks would compile them again.
    """
    norms: dict[int, Tensor] = {}
    first: list[Tensor] = []

    def record(layer: int, gradient_RD: Tensor) -> None:
        dtype = torch.promote_types(gradient_RD.dtype, torch.float32)
        norms[layer] = torch.linalg.vector_norm(gradient_RD, dim=1, dtype=dtype)

    def watch(layer: int, _block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x_RD, *rest = inputs
        if layer == 0:  # the backward pass ends here, even if embedding or lower layers are frozen
            x_RD = x_RD.detach().requires_grad_()
            first.append(x_RD)
        else:
            x_RD.register_hook(partial(record, layer))
        return (x_RD, *rest)

    with ExitStack() as stack:
        for layer, block in enumerate(model.blocks):
            stack.enter_context(block.register_forward_pre_hook(partial(watch, layer)))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        loss = training_loss(model, batch).total / loss_weight
        (gradient_RD,) = torch.autograd.grad(loss, first)
    record(0, gradient_RD)
    return torch.stack([norms[layer] for layer in range(len(model.blocks))])


def _own_rows(whole_T: Tensor, batch: Batch, rows: int, shard: DataShard) -> Tensor:
    """Values of the `rows` rows that this rank has between the layers, -1 for padding; `batch`: the rank's."""
    if shard.engine is not None:
        whole_T = shard.engine.sequence(len(whole_T)).shard(whole_T, shard.engine.rank, padding=-1)
    return whole_T[batch.first_row : batch.first_row + rows]


def reach_statistics(observed: list[ObservedGradients], layers: int, device: torch.device) -> ReachStatistics:
    """Statistics of the observations of all ranks. Called on all ranks together."""
    nothing_LB = torch.zeros(layers, DISTANCES, dtype=torch.float64, device=device)
    sums = torch.stack([nothing_LB] * 3)
    for one in observed:
        counted = (torch.ones_like(one.norms_LR), one.norms_LR, one.norms_LR == 0)
        sums += torch.stack([one.by_bucket(values_LR) for values_LR in counted])
    dist.all_reduce(sums)
    tokens_LB, norms_LB, zero_LB = sums
    # A second sum over the ranks: the threshold goes by the mean of all tokens, which is known only now.
    threshold_L1 = context_thresholds(tokens_LB, norms_LB)
    reached_LB = sum((one.by_bucket(one.norms_LR > threshold_L1) for one in observed), start=nothing_LB)
    dist.all_reduce(reached_LB)
    return ReachStatistics(tokens_LB.cpu(), norms_LB.cpu(), zero_LB.cpu(), reached_LB.cpu())


def summarize(found: Mapping[str, ReachStatistics], own: str, sequences: int) -> EvaluationResult:
    """Result of measuring one model with several attentions, by name; `own` is the one it is trained with."""
    reach = found[own].reach.tolist()
    numbers = {"gradient_reach": reach[0], "gradient_reach_last": reach[-1]}
    message = (
        f"gradient reaches {reach[0]:.1%} of the context in the first layer, {reach[-1]:.1%} in the last, with {own} "
        "attention"
    )
    if "full" in found and own != "full":
        full = found["full"].reach.tolist()
        numbers |= {"gradient_reach_full": full[0], "gradient_reach_last_full": full[-1]}
        message += f"; {full[0]:.1%} and {full[-1]:.1%} with full attention on the same weights"
    tokens = found[own].tokens[0].long().tolist()
    buckets = [bucket for bucket, count in enumerate(tokens) if count]
    data = {
        "attention": own,
        "sequences": sequences,
        "loss_tokens": tokens[0],
        "context_tokens": sum(tokens[1:]),
        "distances": [distance_label(bucket) for bucket in buckets],
        "tokens": [tokens[bucket] for bucket in buckets],
        "layers": {name: _layers(statistics, buckets) for name, statistics in found.items()},
    }
    table = [line for name, statistics in found.items() for line in _table(name, statistics, buckets)]
    return EvaluationResult(numbers, message, [*table, message], data)


def _layers(statistics: ReachStatistics, buckets: list[int]) -> list[dict[str, Any]]:
    """Statistics of each layer as JSON values; lists are over the buckets."""
    by_distance = {
        "norm": statistics.norms / statistics.tokens,
        "mass": statistics.mass,
        "reached": statistics.reached / statistics.tokens,
        "zero": statistics.zeros / statistics.tokens,
    }
    of_layer = {
        "reach": statistics.reach,
        "zero_share": statistics.zero_share,
        "context_norm": statistics.context_norm,
    }
    return [
        {"layer": layer}
        | {key: _json(values[layer].item()) for key, values in of_layer.items()}
        | {key: [_json(value) for value in values[layer, buckets].tolist()] for key, values in by_distance.items()}
        for layer in range(len(statistics.tokens))
    ]


def _json(value: float) -> float | None:
    """The value, or None if it is not finite, because JSON has no such numbers."""
    return value if math.isfinite(value) else None


def _table(name: str, statistics: ReachStatistics, buckets: list[int]) -> list[str]:
    """Reach of each layer, in total and by distance."""
    context = [bucket for bucket in buckets if bucket]
    shares = statistics.reached / statistics.tokens
    heads = ["context", "zero", *map(distance_label, context)]
    lines = [f"reached, {name:<16}" + "".join(f"{head:>13}" for head in heads)]
    for layer in range(len(statistics.tokens)):
        cells = [statistics.reach[layer], statistics.zero_share[layer], *shares[layer, context]]
        lines.append(f"{f'layer {layer}':<25}" + "".join(f"{float(cell):>13.1%}" for cell in cells))
    return lines
