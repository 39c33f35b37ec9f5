"""One optimizer step as the trainer hands it around: this rank's data, and the counts of all ranks together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moba_train.data.batch import Batch
from moba_train.parallel.world import sum_over_ranks


@dataclass(frozen=True)
class StepData:
    """The micro-batches of one optimizer step on this rank."""

    batches: list[Batch]
    began: float
    """`time.perf_counter()` when the rank began to wait for them: the beginning of the step."""
    waited_s: float
    """Seconds until they were there."""

    @property
    def padding_fraction(self) -> float:
        """Share of this rank's tokens that belong to no document."""
        return sum(batch.padding for batch in self.batches) / sum(batch.layout.total for batch in self.batches)


class StepCounts(NamedTuple):
    """Numbers known on the host before the forward pass, of one rank or summed over all."""

    loss_weight: float
    """Sum of the token weights: the step's loss is the sum of weighted token losses / this, over all ranks."""
    loss_tokens: float
    """Tokens that carry loss."""
    ranks_without_loss: float
    """1 on a rank that has no such token."""
    stops: float
    """1 on a rank that is asked to stop before this step."""

    @staticmethod
    def of_rank(batches: Sequence[Batch], stop: bool) -> "StepCounts":
        """The counts of this rank's `batches`."""
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        weight = sum(batch.loss_weight_sum for batch in batches)
        return StepCounts(weight, loss_tokens, float(loss_tokens == 0), float(stop))

    def summed_over_ranks(self) -> "StepCounts":
        """The sum of all ranks' counts. Called on all ranks together; never touches the GPU."""
        return StepCounts(*sum_over_ranks([*self]))

    def metrics(self, batch_tokens: int) -> dict[str, float]:
        """For the log; `batch_tokens`: tokens of the step over all ranks."""
        return {
            "loss_tokens": self.loss_tokens,
            "loss_token_fraction": self.loss_tokens / batch_tokens,
            "ranks_with_zero_loss_tokens": self.ranks_without_loss,
        }
