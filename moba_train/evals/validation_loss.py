"""Mean token loss on held-out text."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from moba_train.config.stages import Stage
from moba_train.data.batch import Batch, collate
from moba_train.data.samples import StageData
from moba_train.evals.evaluation import (
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


class ValidationLoss(Evaluation[None]):
    """Mean loss on `evaluation.sequences` samples of `data.validation`, equal ones for equal seeds and lengths."""

    name = "validation_loss"
    key = "data.validation"
    numbers = frozenset({"eval_loss"})

    def __init__(self, options: None, setting: EvaluationSetting) -> None:
        super().__init__(options, setting)
        self._data = setting.validation_data(setting.sequences)
        self._data.check_loss()

    @classmethod
    def sequences_per_pass(cls, stage: Stage) -> int:
        """A micro-batch."""
        return stage.micro_batch_size

    def run(self, context: EvaluationContext) -> EvaluationResult:
        """`eval_loss` in nats per token."""
        micro_batch_size = context.stage.micro_batch_size
        losses = {
            name: validation_loss(
                context.model,
                self._data,
                micro_batch_size,
                context.data_shard,
                context.device,
                context.between_batches,
            )
            for name in context.each_attention()
        }
        own = losses[context.own].mean
        table = [f"{name:<24} validation loss {loss.mean:.4f} nats per token" for name, loss in losses.items()]
        data: dict[str, Any] = {name: loss.mean for name, loss in losses.items()}
        data["by_sequence"] = {name: finite(loss.by_sequence.round(5).tolist()) for name, loss in losses.items()}
        return EvaluationResult({"eval_loss": own}, f"validation loss {own:.4f}", table, data)


@dataclass(frozen=True)
class SequenceLosses:
    """Losses of held-out sequences, in nats."""

    sums: npt.NDArray[np.float64]
    """[sequences]: weighted sum over the tokens."""
    weights: npt.NDArray[np.float64]
    """[sequences]: sum of the weights; 0 if no token carries loss."""

    @property
    def mean(self) -> float:
        """Mean over all tokens; NaN if none carries loss."""
        weight = float(self.weights.sum())
        return float(self.sums.sum()) / weight if weight else float("nan")

    @property
    def by_sequence(self) -> npt.NDArray[np.float64]:
        """Mean over the tokens of each sequence, [sequences]; NaN if none carries loss."""
        nothing = np.full_like(self.sums, np.nan)
        return np.divide(self.sums, self.weights, out=nothing, where=self.weights > 0)


@torch.no_grad()
def validation_loss(
    model: Transformer,
    data: StageData,
    micro_batch_size: int,
    data_shard: DataShard,
    device: torch.device,
    between_batches: Callable[[], None] = never_stops,
) -> SequenceLosses:
    """Losses of all sequences of `data`, equal on every rank and, up to rounding, for every layout.

    Called on all ranks together: each makes the same number of passes, filled up with repetitions of the last sequence,
    which do not count.
    """
    per_pass = data_shard.dp_size * micro_batch_size
    rows = -(-data.sequences // per_pass) * per_pass  # the last ones do not count
    totals = torch.zeros(rows, 2, dtype=torch.float64, device=device)
    for first in range(0, data.sequences, per_pass):
        between_batches()
        begin = first + data_shard.dp_rank * micro_batch_size
        indices = range(begin, begin + micro_batch_size)
        whole = collate([data.sample(min(index, data.sequences - 1)) for index in indices])
        batch = data_shard.shard_batch(whole).to(device)
        losses_n = token_losses(model, batch)
        weights_n = batch.loss_weight * data_shard.computes_loss
        sums_n2 = torch.stack([losses_n * weights_n, weights_n], 1).double()
        sequence_n = _sequences(whole, data.seq_len, data_shard).to(device)
        for sequence in range(micro_batch_size):
            totals[begin + sequence] = (sums_n2 * (sequence_n == sequence)[:, None]).sum(0)
    dist.all_reduce(totals)
    sums, weights = totals[: data.sequences].T.cpu().numpy()
    return SequenceLosses(sums, weights)


def _sequences(batch: Batch, seq_len: int, data_shard: DataShard) -> torch.Tensor:
    """Index in the micro-batch of the sequence that each of this rank's loss tokens belongs to, int64 [n]."""
    numbers = torch.arange(len(batch.tokens)) // seq_len
    # A label goes wherever its token goes.
    shard = data_shard.shard_batch(dataclasses.replace(batch, labels=numbers))
    return shard.labels[shard.loss_index]
