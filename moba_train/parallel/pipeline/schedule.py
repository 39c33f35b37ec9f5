"""Training steps of a pipeline, by the schedules of torch.distributed.pipelining.

1F1B: Narayanan et al. 2019 (PipeDream); interleaved: Narayanan et al. 2021 (arXiv:2104.04473); zero bubble: Qi et al.
2023 (arXiv:2401.10241). Torch's stages send hidden states one way and their gradients the other. Whatever else a part
needs, its rank has: each part takes the rank's micro-batches in order, as every schedule runs them.

FSDP gathers the weights once a step and reduces the gradients once, after the last backward pass of the rank: until
then they add up in float32, unsharded.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from moba_train.data.batch import Batch
from moba_train.model.feed_forward import count_tokens
from moba_train.model.loss import LossSums
from moba_train.parallel.pipeline.model import PipelineModel
from moba_train.parallel.world import any_rank


def accumulate_gradients(model: PipelineModel, batches: Sequence[Batch]) -> LossSums:
    """Add the gradients of the loss sums of these micro-batches to those of this rank's parameters.

    Returns this rank's part of the sums over the micro-batches. Called on all ranks together.
    """
    shape = (len(batches), model.rows(batches[0].tokens))
    # Gathering for each micro-batch would send the weights once for each forward and backward pass of a step.
    _hold_weights(model, hold=True)
    if not isinstance(model.training_schedule, TrainingSchedule) or model.training_schedule.shape != shape:
        # Made again for another shape alone: torch's stages keep buffers of these sizes.
        model.training_schedule = TrainingSchedule(model, *shape, batches[0].tokens.device)
        # Stages of the 8B on four H100 began to compile 18 to 20 s apart, and the first step had not ended after 150 s;
        # with this it ends 62 s after the start (benchmarks/results/training-8b-8k-pp4-h100-x4.json).
        _compile_parts(model, batches[0])
    sums = model.training_schedule.run(batches)
    _hold_weights(model, hold=False)
    _add_tied_gradients(model)
    return sums


class TrainingSchedule:
    """The stages of this rank for steps of `count` micro-batches, with `rows` rows on this rank each.

    Made at the first step of that shape and attention: torch keeps a buffer for each hidden state and each gradient
    that a step receives.
    """

    def __init__(self, model: PipelineModel, count: int, rows: int, device: torch.device) -> None:
        self.shape = (count, rows)
        self._model = model
        self._parts = [_Part(model, number, count) for number in model.place.own]
        stages: list[Any] = [_torch_stage(part, rows, device) for part in self._parts]
        # Gradients are not scaled: the loss is divided by the weights of all micro-batches before the forward pass.
        options: dict[str, Any] = {"loss_fn": lambda loss, _target: loss.sum(), "scale_grads": False}
        match model.place.schedule:
            case "1f1b":
                (stage,) = stages
                self._schedule: Any = Schedule1F1B(stage, count, **options)
            case "interleaved_1f1b":
                self._schedule = ScheduleInterleaved1F1B(stages, count, **options)
            case "zero_bubble":
                self._schedule = ScheduleInterleavedZeroBubble(stages, count, **options)
        self._reducer: PipelineStage | None = None
        if model.place.schedule == "zero_bubble":
            # Its last pass only computes gradients of weights, in which FSDP is not called: torch does it by hand.
            self._reducer = PipelineStage(
                model, model.place.own[0], len(model.place.parts), device, group=model.place.group
            )
        # NCCL wants all ranks of a group in its first call, and torch begins with transfers between two of them.
        dist.all_reduce(torch.zeros(1, device=device), group=model.place.group)
        # Torch hands out a row of these to each micro-batch; they only have to be there.
        rows_of_batches = torch.arange(count)
        self._inputs = [rows_of_batches] if stages[0].is_first else []
        self._targets = {"target": rows_of_batches} if stages[-1].is_last else {}

    def run(self, batches: Sequence[Batch]) -> LossSums:
        """All forward and backward passes of a step; this rank's part of the loss sums."""
        for part in self._parts:
            part.begin_step(batches)
        self._schedule.step(*self._inputs, **self._targets)
        if self._reducer is not None:
            self._reducer.perform_reduce_grad(1)
        return self._sums()

    def _sums(self) -> LossSums:
        """Sums over the micro-batches, with the auxiliary losses of all layers if any layer of the model has one."""
        loss = torch.stack([sums.loss for part in self._parts for sums in part.sums]).sum()
        auxiliary = {part: [sums.auxiliary for sums in part.sums if sums.auxiliary is not None] for part in self._parts}
        if not any_rank(any(auxiliary.values())):
            return LossSums(loss, None)
        by_layer = torch.zeros(self._model.config.layers, device=loss.device)
        for part, found in auxiliary.items():
            if found:
                by_layer[list(part.layers)] = torch.stack(found).sum(0)
        return LossSums(loss, by_layer)


class _Part(nn.Module):
    """One part of the model, as torch's schedules call it: once for each micro-batch of a step, in order."""

    def __init__(self, model: PipelineModel, number: int, count: int) -> None:
        super().__init__()
        self.number = number
        self.layers = model.place.parts[number].layers
        self.sums: list[LossSums] = []
        """The part's contributions to the loss sums of each micro-batch, without gradient."""
        self._models = [model]  # not a submodule: FSDP's root would be called through this module
        self._count = count
        self._batches: Iterator[Batch] = iter(())

    @property
    def model(self) -> PipelineModel:
        """The rank's part of the model."""
        return self._models[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Parameters of the part, not sharded while FSDP holds the weights. The zero-bubble schedule asks for them."""
        return self.model.parameters_of(self.number)

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Give the part the micro-batches of a step."""
        self.sums = []
        self._batches = iter(batches)

    def forward(self, x_TD: Tensor) -> Tensor:
        """The residual stream after the part, given the one before; after the last part the loss, [1]."""
        batch = next(self._batches)
        count_tokens(self.model, batch.loss_on)
        x_TD, sums = self.model.run_part(self.number, x_TD, batch.tokens, batch.positions, batch.layout, batch.loss_on)
        count_tokens(self.model, None)
        auxiliary = sums.auxiliary
        self.sums.append(LossSums(sums.loss.detach(), None if auxiliary is None else auxiliary.detach()))
        output = x_TD
        if self.model.place.parts[self.number].has_output:
            output = torch.stack([sums.total])
        elif auxiliary is not None and auxiliary.requires_grad:
            output = _WithLoss.apply(x_TD, auxiliary.sum())
        if not output.requires_grad:  # all frozen up to here, but a backward pass must begin somewhere
            output = output.requires_grad_()
        is_last_backward = self.number == self.model.place.own[0] and len(self.sums) == self._count
        # A hook, because torch's schedule calls the backward passes by itself.
        if is_last_backward and self.model.place.schedule != "zero_bubble":
            output.register_hook(partial(_end_accumulation, self.model))
        return output


def _compile_parts(model: PipelineModel, batch: Batch) -> None:
    """Run this rank's parts once, forward and backward, on hidden states drawn at random.

    What is compiled at its first call is so on all ranks at the same time; in the schedule, where a part waits for the
    one before it, ranks would compile one after the other. The gradient is zero and changes no sum.
    """
    place = model.place
    if place.schedule == "zero_bubble":  # it cannot be compiled, and takes backward passes apart
        return
    shape, device = (model.rows(batch.tokens), model.config.hidden_size), batch.tokens.device
    drawn = torch.Generator(device).manual_seed(0)  # not the run's own numbers
    for number in place.own:
        x_TD = torch.randn(shape, generator=drawn, dtype=place.dtype, device=device, requires_grad=True)
        x_TD, sums = model.run_part(number, x_TD, batch.tokens, batch.positions, batch.layout, batch.loss_on)
        outputs = [sums.total] if place.parts[number].has_output else [x_TD, sums.auxiliary]
        given = [output for output in outputs if output is not None and output.requires_grad]
        torch.autograd.backward(given, list(map(torch.zeros_like, given)))
    model.largest_lse.begin_step()  # those of random states are not the step's


def _torch_stage(part: _Part, rows: int, device: torch.device) -> PipelineStage:
    place = part.model.place
    own = place.parts[part.number]
    hidden = torch.empty(rows, part.model.config.hidden_size, dtype=place.dtype, device="meta", requires_grad=True)
    loss = torch.empty(1, device="meta", requires_grad=True)
    number_of_batch = torch.empty(1, dtype=torch.int64, device="meta")
    return PipelineStage(
        part,
        part.number,
        len(place.parts),
        device,
        input_args=number_of_batch if own.has_embedding else hidden,
        output_args=loss if own.has_output else hidden,
        group=place.group,
    )


class _WithLoss(torch.autograd.Function):
    """Returns a hidden state as it is; the backward pass through it also begins that of a loss."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, loss: Tensor) -> Tensor:
        ctx.shape = loss.shape
        return x_TD.clone()  # no view: the zero-bubble schedule detaches a part's output in place

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[Tensor, Tensor]:
        return gradient_TD, torch.ones(ctx.shape, device=gradient_TD.device)


def _end_accumulation(model: PipelineModel, _gradient: Tensor) -> None:
    """Ends gradient accumulation as the rank's last backward pass begins: in it, FSDP reduces all gradients and frees
    the weights."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(True)


def _hold_weights(model: PipelineModel, hold: bool) -> None:
    """Sets whether the weights that a pass gathers stay for the next one, and gradients stay on the rank."""
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(not hold)
    model.set_reshard_after_backward(not hold)
    model.set_requires_gradient_sync(not hold)
    model.set_is_last_backward(not hold)


def _add_tied_gradients(model: PipelineModel) -> None:
    """Add up the gradients of a tied embedding, which the first and the last rank hold a copy of: both get the sum."""
    place = model.place
    ends = (0, place.group.size() - 1)
    if not model.config.tie_embeddings or place.rank not in ends or model.embedding.weight.grad is None:
        return
    gradient = model.embedding.weight.grad
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    other = torch.empty_like(own)
    peer = dist.get_global_rank(place.group, ends[1] - place.rank)
    # Both directions in one batch: two blocking calls on both ends would wait for each other.
    exchange = [dist.P2POp(dist.isend, own, peer, place.group), dist.P2POp(dist.irecv, other, peer, place.group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    own += other
