"""Loss by position in the context, on samples that lie inside one document."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moba_train.config.base import format_count
from moba_train.config.evaluation import PositionWiseConfig
from moba_train.config.mesh import divisors
from moba_train.data.batch import collate
from moba_train.data.long_documents import LongDocumentSamples, count_samples
from moba_train.data.samples import Sample
from moba_train.evals.evaluation import (
    AnyOptions,
    Evaluation,
    EvaluationContext,
    EvaluationResult,
    EvaluationSetting,
    finite,
    never_stops,
)
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard
from moba_train.parallel.forward import token_losses


class LongDocumentEvaluation(Evaluation[AnyOptions]):
    """Base of evaluations on samples that lie inside one document each, `sequences` of them. Where their options have a
    `bucket`, it divides the stage's length."""

    def __init__(self, options: Any, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        seq_len = setting.stage.seq_len
        self._samples = LongDocumentSamples(
            setting.validation, seq_len, options.sequences, setting.seed, setting.model.vocab_size
        )
        if not len(self._samples):
            self.missing = f"data.validation has no document longer than the stage's {seq_len} tokens"

    @classmethod
    def problems(cls, options: Any, setting: EvaluationSetting) -> Iterator[str]:
        """No documents to evaluate on, or a bucket that does not divide the stage's length."""
        if not setting.validation:
            yield f"{cls.key}: needs documents to evaluate on; set data.validation, or remove it"
        stage = setting.stage
        bucket = getattr(options, "bucket", 1)
        if stage.evaluate and stage.seq_len % bucket:
            given = f"{cls.key}.bucket: given {bucket}"
            near = min(divisors(stage.seq_len), key=lambda size: abs(size - bucket))
            yield f"{given}, which does not divide stages[{stage.index}].seq_len {stage.seq_len}; nearest: {near}"

    def _curves(self, context: EvaluationContext, bucket: int) -> "dict[str, PositionWiseLoss]":
        """The loss by position, in buckets, with each attention."""
        shared = context.data_shard, context.device, context.between_batches
        names = context.each_attention()
        return {name: position_wise_loss(context.model, self._samples, bucket, *shared) for name in names}


class PositionWise(LongDocumentEvaluation[PositionWiseConfig]):
    """Loss by position in the context, in buckets; the last is the trailing loss. See docs/how-to/stages.md."""

    name = "position_wise"
    Options = PositionWiseConfig
    numbers = frozenset({"trailing_loss", "trailing_loss_error"})
    numbers_against_full = frozenset({"trailing_loss_full", "trailing_gap", "trailing_gap_error"})

    @classmethod
    def default_options(cls, setting: EvaluationSetting) -> PositionWiseConfig:
        """Buckets that divide the stage's length, at least four of them."""
        seq_len = setting.stage.seq_len
        quarter = 1 << (max(seq_len // 4, 1).bit_length() - 1)
        return PositionWiseConfig(bucket=min(math.gcd(2048, seq_len), quarter))

    @classmethod
    def data_problems(cls, options: PositionWiseConfig, setting: EvaluationSetting) -> Iterator[str]:
        """Fewer than two samples: a single one has no standard error."""
        seq_len = setting.stage.seq_len
        found = count_samples(setting.validation, seq_len)
        if found < 2:
            yield (
                f"data.validation has {found} samples of {seq_len} tokens inside one document, but the trailing loss "
                "needs at least 2; hold out longer documents"
            )

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`trailing_loss` and, if full attention is also tried, `trailing_gap`, each with its standard error."""
        curves = self._curves(context, self._options.bucket)
        found = summarize(curves, context.own)
        # Samples of one document are alike: a comparison of runs counts documents.
        return replace(found, data={**found.data, "documents": self._samples.documents})


@dataclass(frozen=True)
class PositionWiseLoss:
    """Losses in nats per token, by bucket of the context. Standard errors are over sequences, not over tokens."""

    bucket: int
    """Tokens in a bucket."""
    losses: npt.NDArray[np.float64]
    """[sequences, buckets]: mean over the tokens of each bucket."""

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """Mean over the sequences, [buckets]."""
        return self.losses.mean(0)

    @property
    def standard_error(self) -> npt.NDArray[np.float64]:
        """Standard error of `mean`, [buckets]; NaN for a single sequence."""
        sequences = len(self.losses)
        return self.losses.std(0, ddof=1) / np.sqrt(sequences) if sequences > 1 else np.full(self.mean.shape, np.nan)

    @property
    def trailing(self) -> float:
        """Loss of the last bucket."""
        return float(self.mean[-1])

    @property
    def trailing_error(self) -> float:
        """Standard error of `trailing`."""
        return float(self.standard_error[-1])

    def above(self, other: "PositionWiseLoss") -> "PositionWiseLoss":
        """Difference to another attention's losses on the same sequences; its standard error is the paired one."""
        return PositionWiseLoss(self.bucket, self.losses - other.losses)

    def to_json(self) -> dict[str, Any]:
        """Means and standard errors, [buckets] each, and the trailing loss of each sequence, as JSON values. A number
        that is not finite is null."""
        values = {
            "mean": self.mean.tolist(),
            "standard_error": self.standard_error.tolist(),
            "trailing_by_sequence": self.losses[:, -1].round(5).tolist(),
        }
        found: dict[str, Any] = finite(values)
        return found


class SamplesOfOneLength(Protocol):
    """Interface of `LongDocumentSamples`: samples that each lie inside one document."""

    @property
    def seq_len(self) -> int:
        """Tokens in a sample."""

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """Sample `index`, part of a single document."""


@torch.no_grad()
def position_wise_loss(
    model: Transformer,
    samples: SamplesOfOneLength,
    bucket: int,
    data_shard: DataShard,
    device: torch.device,
    between_batches: Callable[[], None] = never_stops,
) -> PositionWiseLoss:
    """The model's loss on all `samples` (at least one), equal on every rank and, up to rounding, for every layout.

    `bucket` divides the length of the samples. Called on all ranks together: each data-parallel rank makes the same
    number of passes, of one sequence each.
    """
    sequences = len(samples)
    buckets = samples.seq_len // bucket
    sums = torch.zeros(sequences, buckets, dtype=torch.float64, device=device)
    for first in range(0, sequences, data_shard.dp_size):
        between_batches()
        index = first + data_shard.dp_rank
        batch = data_shard.shard_batch(collate([samples.sample(min(index, sequences - 1))])).to(device)
        losses_n = token_losses(model, batch)
        if index < sequences:
            # Each position occurs at most once on a rank, so the result does not depend on the order of additions.
            loss_T = torch.zeros(samples.seq_len, dtype=torch.float64, device=device)
            loss_T[batch.positions[batch.loss_index]] = (losses_n * batch.loss_weight).double()
            sums[index] = loss_T.view(buckets, bucket).sum(1)
    dist.all_reduce(sums)
    return PositionWiseLoss(bucket, (sums / bucket).cpu().numpy())


def summarize(curves: Mapping[str, PositionWiseLoss], own: str) -> EvaluationResult:
    """The result of evaluating one model with several attentions, by name; `own` is the one it was trained with."""
    curve = curves[own]
    full = curves.get("full")
    message = f"trailing loss {curve.trailing:.4f} +- {curve.trailing_error:.4f} with {own} attention"
    numbers = {"trailing_loss": curve.trailing, "trailing_loss_error": curve.trailing_error}
    if full is not None and own != "full":
        gap = curve.above(full)
        message += f", {gap.trailing:+.4f} +- {gap.trailing_error:.4f} against full attention on the same weights"
        numbers["trailing_loss_full"] = full.trailing
        numbers["trailing_gap"] = gap.trailing
        numbers["trailing_gap_error"] = gap.trailing_error
    by_name = {name: other.to_json() for name, other in curves.items()}
    data = {"bucket": curve.bucket, "sequences": len(curve.losses), "attention": own, "curves": by_name}
    return EvaluationResult(numbers, message, [*_table(curves), message], data)


def _table(curves: Mapping[str, PositionWiseLoss]) -> list[str]:
    """Loss by position, a line for each bucket."""
    some = next(iter(curves.values()))
    lines = [f"{'tokens':<20}" + "".join(f"{name:>20}" for name in curves)]
    for place in range(some.losses.shape[1]):
        first, last = (format_count(edge, 1024) for edge in (place * some.bucket, (place + 1) * some.bucket))
        cells = [f"{curve.mean[place]:.4f} +- {curve.standard_error[place]:.4f}" for curve in curves.values()]
        lines.append(f"{f'{first} to {last}':<20}" + "".join(f"{cell:>20}" for cell in cells))
    return lines
