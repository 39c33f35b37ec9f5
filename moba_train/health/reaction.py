"""Reactions of a run to a spike and to a step that is not finite.

A run applies the step of a spike, skips it, rolls back to a good checkpoint, or stops. Skipping is the cheapest
reaction: the gradients of a flagged step are dropped before they reach the weights. A rollback at the first flagged
step would only compute the same weights again, so it is for damage that skipping cannot repair: in the weights
themselves.

A step whose loss or gradient norm is not finite runs again on the same batch before anything is concluded from it. The
weights are the same, and nothing in a step is random. So a second run with finite values shows that the machine was
wrong the first time: the fault is transient, and the ranks whose values were not finite are suspect. A second run that
is not finite either shows that data, weights or program are the cause: the fault is reproducible. Megatron-LM's rerun
state machine makes the same distinction.
"""

import math
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.checkpoint.publish import Accept, is_good, saved_step
from moba_train.config.health import SpikeConfig
from moba_train.health.spike import SpikeReport
from moba_train.parallel.world import gather_over_ranks

BUDGET_STEPS = 1000
"""Steps over which skips and rollbacks are counted: a budget for the whole run would end every long run."""
MOST_TRANSIENT = 3
"""Transient faults in as many steps that are allowed."""

Action = Literal["apply", "skip", "rollback", "stop"]


@dataclass(frozen=True)
class Reaction:
    """Decision about a step, and the text about it for the log."""

    action: Action
    message: str


def react(
    config: SpikeConfig, report: SpikeReport, step: int, skipped: list[int], rollbacks: list[list[int]]
) -> Reaction:
    """The reaction to the report of `step`, given the steps `skipped` so far and the `rollbacks` [[from, to], ...].

    Depends only on numbers that are equal on all ranks, so that all ranks decide alike.
    """
    skips = sum(old > step - BUDGET_STEPS for old in skipped)
    returns = sum(old > step - BUDGET_STEPS for old, _ in rollbacks)
    skips_help = report.flagged and skips < config.max_skips
    skip = Reaction("skip", f"step not applied ({skips + 1} of max_skips {config.max_skips} in {BUDGET_STEPS} steps)")
    match config.reaction:
        case "log" if report.level == "fatal":
            return Reaction("stop", "health.spike.reaction is log, which ends the run here")
        case "skip_step" if skips_help:
            return skip
        case "skip_step" if report.flagged:
            spent = f"{skips} steps skipped in {BUDGET_STEPS}, as many as health.spike.max_skips allows"
            return Reaction("stop", spent)
        case "rollback" if report.level == "warn" and skips_help:
            return skip
        case "rollback" if report.level != "ok" and returns < config.max_rollbacks:
            return Reaction("rollback", f"rollback {returns + 1} of max_rollbacks {config.max_rollbacks}")
        case "rollback" if report.level != "ok":
            spent = (
                f"{returns} rollbacks in the last {BUDGET_STEPS} steps, as many as health.spike.max_rollbacks allows"
            )
            return Reaction("stop", spent)
    return Reaction("apply", "")


def good_before(step: int, flagged: Collection[int], rollbacks: Collection[list[int]]) -> Accept:
    """Accepts the meta of a checkpoint from before `step` that was saved while the detector was calm.

    The step after it must not be among the `flagged` ones: weights that the next step finds broken were saved broken.
    And it must not lie among the steps that one of the `rollbacks` [[from, to], ...] has undone. A meta that names no
    step (a checkpoint from elsewhere) is not accepted.
    """

    def accept(meta: dict[str, Any]) -> bool:
        saved = saved_step(meta)
        if saved is None:
            return False
        undone = any(back_to < saved < back_from for back_from, back_to in rollbacks)
        return is_good(meta) and saved < step and saved + 1 not in flagged and not undone

    return accept


MOST_NAMED = 8
"""Largest number of document parts that an event names, and of steps that a message names."""

MOST_LISTED = 3
"""Largest number of document parts that a message names."""


class RankEvidence(NamedTuple):
    """Facts that a rank knows about a step that went wrong."""

    rank: int
    host: str
    loss: float
    """Sum of the rank's weighted token losses, before they are added up over the ranks."""
    not_finite: list[str]
    """Parameters whose gradient is not finite in the shard that the rank holds, in the order of the model."""
    parameters: int
    """Parameters that have a gradient."""


class TransientFault(NamedTuple):
    """A fault that did not repeat."""

    message: str
    ranks: list[int]
    """Ranks whose values were not finite; empty if only their sums were not."""
    hosts: list[str]
    """Hosts of these ranks."""


def gather_evidence(model: nn.Module, own_loss_sum: Tensor) -> list[RankEvidence]:
    """Evidence of every rank, taken while the gradients of the faulty run are in place. Called on all ranks together.

    own_loss_sum: sum of this rank's weighted token losses, a scalar
    """
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    locals_ = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients.values()]
    finite = torch.stack([local.isfinite().all() for local in locals_]).tolist() if locals_ else []
    not_finite = [name for name, fine in zip(gradients, finite, strict=True) if not fine]
    own = RankEvidence(dist.get_rank(), socket.gethostname(), own_loss_sum.item(), not_finite, len(gradients))
    return gather_over_ranks(own)


def transient_fault(
    first: Mapping[str, float], second: Mapping[str, float], evidence: Sequence[RankEvidence]
) -> TransientFault:
    """The fault of a step whose `first` run was not finite and whose `second` was: loss and gradient norm of each."""
    wrong_losses = [rank for rank in evidence if not math.isfinite(rank.loss)]
    wrong_gradients = [rank for rank in evidence if rank.not_finite]
    if wrong_losses:
        place = f"The loss was not finite on {_named(wrong_losses)}"
        if len(wrong_losses) > 1:
            place += "; ranks of one cp or tp group pass values on, so that one of them may have harmed the others"
    elif wrong_gradients:
        worst = max(wrong_gradients, key=lambda rank: len(rank.not_finite))
        place = (
            "Every rank's own loss was finite, so the fault is in the backward pass or in communication; gradients "
            f"were not finite on {_named(wrong_gradients)}, on rank {worst.rank} those of {len(worst.not_finite)} of "
            f"{worst.parameters} parameters, the first of them {worst.not_finite[0]}"
        )
    else:
        place = "Every rank's own loss and gradients were finite, so the fault is in the communication of their sums"
    message = (
        f"transient: {_values(first)}, but {_values(second)} when the step was run again on the same batch; the second "
        f"run counts. {place}"
    )
    blamed = wrong_losses or wrong_gradients
    return TransientFault(message, [rank.rank for rank in blamed], sorted({rank.host for rank in blamed}))


def too_many_transient(faults: Sequence[tuple[int, list[str]]], step: int) -> str | None:
    """Reason to end a run with these transient `faults` (step, hosts): more than MOST_TRANSIENT of them lie in the
    1,000 steps up to `step`. None if it should go on."""
    recent = [(old, hosts) for old, hosts in faults if old > step - BUDGET_STEPS]
    if len(recent) <= MOST_TRANSIENT:
        return None
    listed = ", ".join(f"step {old} ({', '.join(hosts) or 'no rank to name'})" for old, hosts in recent[-MOST_NAMED:])
    return (
        f"{len(recent)} transient faults in {BUDGET_STEPS} steps, {MOST_TRANSIENT} are allowed: {listed}. "
        "A node is suspect: test it, and go on without it"
    )


def reproducible_fault(ranks: Iterable[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Message about a step that was not finite twice, from the entries of all `ranks` in its dump (health/dump.py), and
    up to 8 document parts: those whose loss is not finite or, if there are none, those of the batch."""
    broken: dict[str, bool] = {}
    for part in (part for rank in ranks for micro_batch in rank["micro_batches"] for part in micro_batch):
        name = "{source} document {document} tokens {start}:{stop}".format(**part)
        broken[name] = broken.get(name, False) or not math.isfinite(part["loss"] or 0.0)
    suspects = [name for name, is_broken in broken.items() if is_broken]
    count = len(broken)
    if not suspects:
        said = f"The forward pass is finite for all {count} document parts of the batch, the backward pass is not"
    elif len(suspects) == count:
        said = f"No document part of the batch has a finite loss: suspect the weights before the data. All {count}"
    else:
        said = (
            f"{len(suspects)} of the batch's {count} document parts have a loss that is not finite (one may spoil the "
            "others of its micro-batch)"
        )
    named = (suspects or list(broken))[:MOST_NAMED]
    more = len(suspects or broken) - len(named[:MOST_LISTED])
    listed = ", ".join(named[:MOST_LISTED]) + (f" and {more} more" if more else "")
    return f"reproducible: the step was run twice on the same batch. {said}: {listed}", named


def _values(numbers: Mapping[str, float]) -> str:
    return f"loss {numbers['loss']:.6g}, gradient norm {numbers['grad_norm']:.6g}"


def _named(ranks: Sequence[RankEvidence]) -> str:
    """The ranks with their hosts: "ranks 0, 1 on node-a and rank 8 on node-b"."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(str(rank.rank))
    return " and ".join(
        f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)} on {host}" for host, numbers in by_host.items()
    )
