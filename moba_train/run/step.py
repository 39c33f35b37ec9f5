"""The clock of a step, and its results: losses, gradient norm, counts of all ranks, and throughput.

Throughput is tokens per second, memory, and model FLOPs utilisation (MFU).
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.batch import Batch
from moba_train.memory.devices import peak_tflops
from moba_train.memory.flops import dense_flops, real_flops
from moba_train.model.loss import LossSums
from moba_train.parallel.world import World, sum_over_ranks


def batch_flops(model: ModelConfig, stage: Stage, batches: Sequence[Batch]) -> float:
    """FLOPs of the micro-batches of one data-parallel rank, forward and backward, by the lengths of their documents.

    Padding counts as documents of its own: that is how it is computed, and `padding_fraction` says how much there is.
    """
    lengths = [stop - start for batch in batches for start, stop in pairwise(batch.layout.edges)]
    return real_flops(model, stage.attention, lengths)


def throughput(model: ModelConfig, stage: Stage, world: World, step_s: float, step_flops: float) -> dict[str, float]:
    """Metrics of a step of `stage` that took `step_s` seconds and `step_flops` operations over all ranks.

    `mfu` counts the keys that each layer's queries really attend to, document by document; `mfu_dense` what full
    attention over whole sequences would cost, the formula behind published numbers. `memory_gib` is this rank's peak
    so far, `reserved_gib` what torch has taken of the GPU for it at most, free pieces included. `allocator_retries`
    counts how often so far torch found no memory for a tensor, waited for the GPU and gave back what was free in
    pieces: it costs time, and memory is nearly used up. A CPU has none of these.
    """
    rate = stage.batch_tokens / step_s
    metrics = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / world.size}
    if world.device.type != "cuda":
        return metrics
    metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    metrics["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    metrics["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    peak = peak_tflops(torch.cuda.get_device_name())
    if peak is not None:
        metrics["mfu"] = step_flops / (step_s * world.size * peak * 1e12)
        metrics["mfu_dense"] = rate / world.size * dense_flops(model, stage.seq_len) / (peak * 1e12)
    return metrics


class StepLosses:
    """Mean losses of one optimizer step, over the token weights of all ranks: the sum of its micro-batches' parts."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        """This rank's part of the step's mean loss (nats per token), float32; the step's after `all_reduce`."""
        self.auxiliary: Tensor | None = None
        """This rank's part of the layers' auxiliary losses, float32 [layers]; None when no attention kind has one."""

    def add(self, part: LossSums) -> None:
        """Add a micro-batch's part."""
        self.loss += part.loss.detach()
        if part.auxiliary is not None:
            auxiliary = part.auxiliary.detach()
            self.auxiliary = auxiliary if self.auxiliary is None else self.auxiliary + auxiliary

    def all_reduce(self) -> None:
        """Sum over all ranks, in place; called on all ranks together."""
        dist.all_reduce(self.loss)
        if self.auxiliary is not None:
            dist.all_reduce(self.auxiliary)


@dataclass(frozen=True)
class StepResult:
    """Losses and norms from a step's forward and backward pass, over all ranks; the gradients are in the model."""

    own_loss_sum: Tensor
    """Sum of this rank's weighted token losses, a scalar."""
    numbers: dict[str, float]
    """`loss`, and `grad_norm`, the L2 norm of all gradients before clipping; on the host."""
    further: dict[str, Any]
    """Further metrics, numbers or lists: gradient norms by attention kind, auxiliary losses, loads of experts."""

    @staticmethod
    def read(losses: StepLosses, own_loss_sum: Tensor, grad_norm: Tensor, norms: dict[str, Tensor]) -> "StepResult":
        """Waits once for the GPU, for all numbers together. `losses` and norms: over all ranks, float32, [] or [n].

        What was read later would wait for the update as well, and the GPU then for the host.
        """
        found = {"loss": losses.loss, "grad_norm": grad_norm} | norms
        # One transfer: read one by one after the update, the norms made the host wait for all of the update and the GPU
        # then for the host, 4.5 to 5 ms of the 8B's step at 8K on two H200 (profile of commit 85230d1, not kept).
        auxiliary = losses.auxiliary if losses.auxiliary is not None else losses.loss.new_zeros(0)
        read = iter(torch.cat([part.flatten() for part in (*found.values(), auxiliary)]).tolist())
        named: dict[str, Any] = {key: [*islice(read, len(x))] if x.dim() else next(read) for key, x in found.items()}
        numbers = {name: named.pop(name) for name in ("loss", "grad_norm")}
        known = {name: value for name, value in named.items() if value != -math.inf}  # no layer notes its `max_lse`
        return StepResult(own_loss_sum, numbers, known | _auxiliary_metrics([*read]))

    @property
    def is_finite(self) -> bool:
        """True if loss and gradient norm are finite; equal on all ranks."""
        return all(map(math.isfinite, self.numbers.values()))


def _auxiliary_metrics(values: Sequence[float]) -> dict[str, float]:
    """`auxiliary_loss`, and of each layer that has one `auxiliary_loss_layer_I`; nothing where no kind has one."""
    if not values:
        return {}
    by_layer = {f"auxiliary_loss_layer_{layer}": value for layer, value in enumerate(values) if value}
    return {"auxiliary_loss": sum(values), **by_layer}


class StepCounts(NamedTuple):
    """Numbers known on the host before the forward pass, of one rank or summed over all."""

    loss_weight: float
    """Sum of the token weights: the step's loss is the sum of weighted token losses / this, over all ranks."""
    loss_tokens: float
    """Tokens that carry loss."""
    ranks_without_loss: float
    """1 on a rank that has no such token, among those that compute the loss."""
    stops: float
    """1 on a rank that is asked to stop before this step."""
    flops: float
    """Floating-point operations of the step, forward and backward, by the lengths of its documents."""
    padding: float
    """Tokens that belong to no document."""

    @staticmethod
    def from_rank(
        batches: Sequence[Batch], stop: bool, flops: float, readers: int = 1, computes_loss: bool = True
    ) -> "StepCounts":
        """The counts of this rank's `batches`. flops: of these batches, forward and backward; readers: ranks that read
        the same batches, each of which counts an equal part of their operations and padding."""
        loss_tokens = sum(batch.loss_tokens for batch in batches)
        return StepCounts(
            loss_weight=sum(batch.loss_weight_sum for batch in batches),
            loss_tokens=loss_tokens,
            ranks_without_loss=float(computes_loss and loss_tokens == 0),
            stops=float(stop),
            flops=flops / readers,
            padding=sum(batch.padding for batch in batches) / readers,
        )

    def summed_over_ranks(self) -> "StepCounts":
        """The sum of all ranks' counts. Called on all ranks together; never touches the GPU."""
        return StepCounts(*sum_over_ranks([*self]))

    def metrics(self, batch_tokens: int) -> dict[str, float]:
        """Metrics of these counts, by name. `batch_tokens`: tokens of the step over all ranks."""
        return {
            "loss_tokens": self.loss_tokens,
            "loss_token_fraction": self.loss_tokens / batch_tokens,
            "ranks_with_zero_loss_tokens": self.ranks_without_loss,
            "padding_fraction": self.padding / batch_tokens,
        }


class StepClock:
    """Times the steps of a run.

    A step begins where the step before was measured, so that its logging and what the GPU still had to do count. After
    anything that is no part of a step (the beginning of a stage, a save, an evaluation, a batch without loss), it
    begins when the rank begins to wait for the step's data.
    """

    def __init__(self) -> None:
        self._measured_at: float | None = None
        """`time.perf_counter()` at which the last step was measured; None after an interruption."""
        self._began = 0.0
        self.waited_s = 0.0
        """Seconds that the current step waited for its data."""

    def interrupt(self) -> None:
        """Note that something is done that is no part of a step."""
        self._measured_at = None

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the wait for the data of the next step, which begins here or where the one before was measured."""
        asked = time.perf_counter()
        yield
        # Begun after the log has waited for the update, the 8B's step at 8K lacks 28 to 38 ms (benchmarks/LOG.md, "The
        # clock of a step").
        self._began = asked if self._measured_at is None else self._measured_at
        self.waited_s = time.perf_counter() - asked

    def measure(self) -> float:
        """Seconds of the current step, which ends here."""
        self._measured_at = time.perf_counter()
        return self._measured_at - self._began

    @property
    def elapsed_s(self) -> float:
        """Seconds since the current step began, with what has followed it."""
        return time.perf_counter() - self._began
