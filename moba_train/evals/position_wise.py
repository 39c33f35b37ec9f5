"""Loss by place in the context, on stretches that lie inside one document."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moba_train.data.batch import collate
from moba_train.data.long_documents import LongDocumentSamples
from moba_train.model.transformer import Transformer
from moba_train.parallel.forward import token_losses
from moba_train.parallel.stage import DataShard


@dataclass(frozen=True)
class PositionWiseLoss:
    """Losses in nats per token, by bucket of the context. Standard errors take sequences, not tokens, as random."""

    bucket: int
    """Tokens in a bucket."""
    losses: npt.NDArray[np.float64]
    """[sequences, buckets]: mean over the tokens of each bucket."""

    @property
    def mean(self) -> npt.NDArray[np.float64]:
        """[buckets]"""
        return self.losses.mean(0)

    @property
    def standard_error(self) -> npt.NDArray[np.float64]:
        """[buckets]: of the mean; NaN for a single sequence."""
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
        """The difference to another attention's losses on the same sequences, whose standard error is that of pairs."""
        return PositionWiseLoss(self.bucket, self.losses - other.losses)

    def to_json(self) -> dict[str, Any]:
        """Means and standard errors, [buckets] each, as JSON values: null where there is none."""
        error = [None if np.isnan(value) else value for value in self.standard_error.tolist()]
        return {"mean": self.mean.tolist(), "standard_error": error}


@torch.no_grad()
def position_wise_loss(
    model: Transformer, stretches: LongDocumentSamples, bucket: int, share: DataShard, device: torch.device
) -> PositionWiseLoss:
    """The model's loss on all `stretches` (at least one), equal on every rank and, up to rounding, for every layout.

    `bucket` divides the stretches' length. Called on all ranks together, which make equally many passes of one sequence
    for each group of ranks that shares one.
    """
    sequences, buckets = len(stretches), stretches.seq_len // bucket
    sums = torch.zeros(sequences, buckets, dtype=torch.float64, device=device)
    for first in range(0, sequences, share.dp_size):
        index = first + share.dp_rank
        batch = share.shard_batch(collate([stretches.sample(min(index, sequences - 1))])).to(device)
        losses_n = token_losses(model, batch)
        if index < sequences:
            # Every place of the sequence is here once at most, so this adds up in one order only.
            loss_T = torch.zeros(stretches.seq_len, dtype=torch.float64, device=device)
            loss_T[batch.positions[batch.loss_index]] = (losses_n * batch.loss_weight).double()
            sums[index] = loss_T.view(buckets, bucket).sum(1)
    dist.all_reduce(sums)
    return PositionWiseLoss(bucket, (sums / bucket).cpu().numpy())


def describe(curves: Mapping[str, PositionWiseLoss], own: str) -> tuple[str, dict[str, float], dict[str, Any]]:
    """Evaluations of one model by the name of its attention, of which it was trained with `own`: in a sentence, as
    numbers to follow over training, and whole, as JSON values."""
    curve, full = curves[own], curves.get("full")
    text = f"trailing loss {curve.trailing:.4f} +- {curve.trailing_error:.4f} with {own} attention"
    numbers = {"trailing_loss": curve.trailing, "trailing_loss_error": curve.trailing_error}
    if full is not None and own != "full":
        gap = curve.above(full)
        text += f", {gap.trailing:+.4f} +- {gap.trailing_error:.4f} against full attention on the same weights"
        numbers["trailing_loss_full"] = full.trailing
        numbers |= {"trailing_gap": gap.trailing, "trailing_gap_error": gap.trailing_error}
    by_name = {name: other.to_json() for name, other in curves.items()}
    whole = {"bucket": curve.bucket, "sequences": len(curve.losses), "attention": own, "curves": by_name}
    return text, numbers, whole
