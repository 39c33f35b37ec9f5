"""Mean token loss on held-out text."""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import collate
from moba_train.data.samples import Sample, StageData
from moba_train.evals.evaluation import Evaluation, EvaluationContext, EvaluationResult, never_stops
from moba_train.model.transformer import Transformer
from moba_train.parallel.forward import training_loss
from moba_train.parallel.stage import DataShard


class ValidationLoss(Evaluation):
    """Mean loss on `evaluation.sequences` samples of `data.validation`: the same ones for a given seed and length."""

    name = "validation_loss"
    key = "data.validation"
    numbers = frozenset({"eval_loss"})

    def __init__(self, config: RunConfig, stage: Stage) -> None:
        self.every = config.evaluation.every
        sequences = config.evaluation.sequences
        vocab_size = config.model.vocab_size
        self._data = StageData(config.data.validation, stage.seq_len, sequences, config.seed, {}, vocab_size)
        self._data.check_loss()

    @classmethod
    def enabled(cls, config: RunConfig) -> bool:
        """Where there is held-out text."""
        return bool(config.data.validation)

    @classmethod
    def switched_on(cls, config: RunConfig, stage: Stage) -> RunConfig:
        """The recipe as it is: held-out text has no default."""
        return config

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
        own = losses[context.own]
        table = [f"{name:<24} validation loss {loss:.4f} nats per token" for name, loss in losses.items()]
        return EvaluationResult({"eval_loss": own}, f"validation loss {own:.4f}", table, dict(losses))


@torch.no_grad()
def validation_loss(
    model: Transformer,
    data: StageData,
    micro_batch_size: int,
    data_shard: DataShard,
    device: torch.device,
    between_batches: Callable[[], None] = never_stops,
) -> float:
    """Mean loss in nats per token over all of `data`, equal on every rank and (up to rounding) for every layout.

    Called on all ranks together: each makes the same number of passes, the last ones padded with samples of weight 0.
    """
    per_pass = data_shard.dp_size * micro_batch_size
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for first in range(0, data.sequences, per_pass):
        between_batches()
        begin = first + data_shard.dp_rank * micro_batch_size
        samples = [_sample_or_padding(data, index) for index in range(begin, begin + micro_batch_size)]
        batch = data_shard.shard_batch(collate(samples)).to(device)
        totals[0] += training_loss(model, batch).loss
        totals[1] += batch.loss_weight_sum
    dist.all_reduce(totals)
    loss_sum, loss_tokens = totals.tolist()
    return loss_sum / loss_tokens if loss_tokens else float("nan")


def _sample_or_padding(data: StageData, index: int) -> Sample:
    sample = data.sample(min(index, data.sequences - 1))
    if index < data.sequences:
        return sample
    return dataclasses.replace(sample, loss_weight=sample.loss_weight * 0)
