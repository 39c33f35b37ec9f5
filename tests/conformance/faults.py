"""Faults of parallel training, put into the ranks on purpose: the comparison with one device must find each."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moba_train.attention.layout import packed_layout
from moba_train.data.batch import Batch
from moba_train.data.loader import step_batches
from moba_train.data.samples import StageData
from moba_train.model import transformer
from moba_train.model.loss import LossTokens, auxiliary_sums
from moba_train.optim import gradients
from moba_train.optim.gradients import Gradients
from moba_train.parallel import data_shard, fsdp, tensor
from moba_train.parallel.context.engine import RankShard
from moba_train.parallel.pipeline import model as pipeline_model
from moba_train.parallel.pipeline import schedule
from moba_train.run import learner
from tests.conformance.layouts import Case

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and another value for it."""


@dataclass(frozen=True)
class Fault:
    """Code that is wrong, and the layouts in which it shows."""

    patches: list[Patch]
    shows: Callable[[Case], bool]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the code is wrong in this process."""
        with ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(patch.object(owner, name, value))
            yield


def has(case: Case, *sizes: str) -> bool:
    """True if the mesh has more than one rank along each of these dimensions."""
    return all(case.parallel[size] > 1 for size in sizes)


def has_auxiliary_loss(case: Case) -> bool:
    """True if a layer's kind adds to the loss of weights that are trained, other than by a single number."""
    found = any("kl_weight" in options or "mode" in options for _, options in case.attention)
    return found and not case.trainable and case.mask in ("all", "sparse") and case.documents != "single tokens"


def sharded_wrongly(change: Callable[[Batch, Any, int], dict[str, Any]]) -> list[Patch]:
    """The shard of a context-parallel rank with fields that `change` gives for (shard, sequence layout, rank)."""
    right = data_shard.shard_batch

    def shard_batch(batch: Batch, sequence: Any, rank: int) -> Batch:
        shard = right(batch, sequence, rank)
        return dataclasses.replace(shard, **change(shard, sequence, rank))

    return [(data_shard, "shard_batch", shard_batch)]


def _auxiliary_by_own_weights(auxiliary: list[Tensor | None], loss_tokens: LossTokens) -> Tensor | None:
    labels_n, index_n, weights_n = loss_tokens
    return auxiliary_sums(auxiliary, (labels_n, index_n, weights_n / weights_n.sum().clamp(min=1e-9)))


def _own_rows_only(self: RankShard, name: str, x_nx: Tensor) -> Tensor:
    whole_Tx = _GATHER(self, name, x_nx)
    kept_T = torch.zeros(len(whole_Tx), *[1] * (whole_Tx.dim() - 1))
    kept_T[self.layout.q_tokens] = 1
    return whole_Tx * kept_T


def _of_the_first_rank(
    data: StageData, first: int, batch_sequences: int, micro_batch_size: int, _dp_rank: int, dp_size: int
) -> list[Batch]:
    return step_batches(data, first, batch_sequences, micro_batch_size, 0, dp_size)


def _by_its_own_sum(self: Batch, divisor: float) -> Batch:
    return _DIVIDED(self, self.loss_weight_sum or divisor)


_GATHER = RankShard.gather
_DIVIDED = Batch.with_weights_divided_by
_FACTOR = FSDPModule.set_gradient_divide_factor
_RIGHT_1F1B = schedule.Schedule1F1B

FAULTS: dict[str, Fault] = {
    "auxiliary losses divided by a rank's own weights": Fault(
        [(module, "auxiliary_sums", _auxiliary_by_own_weights) for module in (transformer, pipeline_model)],
        has_auxiliary_loss,
    ),
    "gradients averaged over ranks instead of summed": Fault(
        [
            (
                FSDPModule,
                "set_gradient_divide_factor",
                lambda self, factor: _FACTOR(self, factor * torch.distributed.get_world_size()),
            )
        ],
        lambda case: case.parallel["dp_replicate"] * case.parallel["dp_shard"] * case.parallel["cp"] > 1,
    ),
    "documents of a shared sequence see each other": Fault(
        sharded_wrongly(lambda shard, *_: {"layout": packed_layout([shard.layout.total])}),
        lambda case: has(case, "cp") and case.documents in ("few", "many"),
    ),
    "positions of a shard counted from its first token": Fault(
        sharded_wrongly(lambda shard, *_: {"positions": torch.arange(len(shard.tokens))}),
        lambda case: has(case, "cp"),
    ),
    "labels of a shard taken from its own next token": Fault(
        sharded_wrongly(lambda shard, *_: {"labels": shard.tokens.roll(-1)}),
        lambda case: has(case, "cp") and case.mask == "all",
    ),
    "the mean of micro-batches' means": Fault(
        [(Batch, "with_weights_divided_by", _by_its_own_sum)],
        lambda case: case.mask == "sparse",
    ),
    "every data-parallel rank reads the first one's sequences": Fault(
        [(data_shard, "step_batches", _of_the_first_rank)],
        lambda case: (has(case, "dp_shard") or has(case, "dp_replicate")) and case.mask == "all",
    ),
    "copies of a gradient counted in its norm": Fault(
        [(gradients, "_copies", lambda _: 1)], lambda case: has(case, "dp_replicate") or has(case, "tp")
    ),
    "a tied embedding's gradient kept by each end of a pipeline": Fault(
        [(schedule, "_add_tied_gradients", lambda _: None)],
        lambda case: has(case, "pp") and "tie_embeddings" in case.model and not case.trainable,
    ),
    "a pipeline's gradients divided by its micro-batches": Fault(
        [(schedule, "Schedule1F1B", lambda *a, **options: _RIGHT_1F1B(*a, **(options | {"scale_grads": True})))],
        lambda case: has(case, "pp") and case.parallel["pp_schedule"] == "1f1b",
    ),
    "auxiliary losses of a pipeline's first layers without gradient": Fault(
        [(schedule._WithLoss, "apply", lambda x_TD, _: x_TD)],
        lambda case: has(case, "pp") and has_auxiliary_loss(case) and case.attention[0][0] in ("seer", "msa"),
    ),
    "the output weight's gradient of one tensor-parallel rank alone": Fault(
        [(tensor, "_gather_weight", lambda weight_VD: weight_VD.full_tensor())],
        lambda case: has(case, "tp") and not case.trainable,
    ),
    "rows of other ranks lost where a kind gathers a sequence": Fault(
        [(RankShard, "gather", _own_rows_only)],
        lambda case: has(case, "cp") and has_auxiliary_loss(case),
    ),
    "states of other ranks lost where a kind carries them on": Fault(
        [(RankShard, "all_ranks", lambda self, x: x.unsqueeze(0).expand(self._sequence.ranks, *x.shape))],
        lambda case: has(case, "cp") and any(kind in ("kda", "lightning") for kind, _ in case.attention),
    ),
    "frozen parameters trained": Fault(
        [(learner, "set_trainable", lambda *_: None)], lambda case: case.trainable is not None
    ),
    "clipping by a rank's own part of the norm": Fault(
        [(Gradients, "norm", lambda self: torch.stack([*self._norms.values()]).norm())],
        lambda case: (
            case.clip_norm is not None
            and case.trainable is None
            and any(has(case, size) for size in ("dp_shard", "cp", "tp", "pp"))
        ),
    ),
    "the weights of another seed on each rank": Fault(
        [(fsdp, "initialize_weights", lambda model, seed: learner_weights(model, seed))], lambda _: True
    ),
}


def learner_weights(model: Any, seed: int) -> None:
    """Initial weights that depend on the rank."""
    from moba_train.model.build import initialize_weights

    initialize_weights(model, seed + torch.distributed.get_rank())
