"""The only places that call the model, one function for each use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from moba_train.data.batch import Batch
from moba_train.model.feed_forward import count_tokens
from moba_train.model.loss import LossSums
from moba_train.model.transformer import Transformer
from moba_train.parallel.activations import keeps_weights
from moba_train.parallel.float8 import update_weight_scales
from moba_train.parallel.pipeline.model import PipelineModel
from moba_train.torch_private import end_sums, unshared_groups


def accumulate_gradients(model: Transformer, batches: Sequence[Batch], loss_weight: float) -> Iterator[LossSums]:
    """Add the gradients of a step's mean losses to those of the parameters, by this rank's micro-batches.

    loss_weight: sum of the token weights of all micro-batches and ranks. Yields losses that add up to this rank's part
    of the step's mean losses: one for each micro-batch, from a pipeline one for all.
    """
    update_weight_scales(model)  # for all micro-batches
    # Before the forward pass, as the loss computes its gradients there, in the compute dtype.
    shares = [batch.with_weights_divided_by(loss_weight) for batch in batches]
    if isinstance(model, PipelineModel):
        # Not at start-up: torch's pipelines import torch._dynamo, 0.6 s of a command that compiles nothing.
        from moba_train.parallel.pipeline import schedule

        yield schedule.accumulate_gradients(model, shares)
        return
    with _own_gradients(model):
        for share in shares:
            with _gathered_until_backward(model):
                count_tokens(model, share.loss_on)
                sums = _loss(model, share)
                count_tokens(model, None)
                sums.total.backward()
            yield sums


@contextmanager
def _own_gradients(model: Transformer) -> Iterator[None]:
    """Inside, gradients of weights that no other rank has a part of add up where the backward pass leaves them, in
    float32; then they become those of the parameters, or are dropped where an error came between. FSDP would list them
    for a kernel and copy them twice, in every micro-batch."""
    groups = unshared_groups(model)
    for group in groups:
        group.reduce_grads = False
    complete = False
    try:
        yield
        complete = True
    finally:
        for group in groups:
            end_sums(group, complete)  # with tp also a sum over ranks: one with an error must not wait for the others


@contextmanager
def _gathered_until_backward(model: Transformer) -> Iterator[None]:
    """Inside, the blocks that `set_activations` told so, and the head, whose backward pass comes at once, keep the
    weights that their forward pass has gathered, until their backward pass frees them.

    Only here: after a forward pass alone, as in an evaluation, they would stay, and the pass after the next update
    would compute with them.
    """
    blocks = [block for block in model.blocks if keeps_weights(block)]
    units = [unit for unit in (*blocks, model.norm) if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()  # all have done so, unless an error came between


def training_loss(model: Transformer, batch: Batch) -> LossSums:
    """Weighted sums of the losses (nats) of this rank's part of a micro-batch, with gradient where that is enabled and
    the model is no pipeline's."""
    update_weight_scales(model)
    return _loss(model, batch)


def _loss(model: Transformer, batch: Batch) -> LossSums:
    return model.loss(batch.tokens, batch.positions, batch.layout, batch.loss_on)


@torch.no_grad()
def token_losses(model: Transformer, batch: Batch) -> Tensor:
    """The loss (nats) of each token in `batch.loss_index`, float32 [n], not weighted, without gradient."""
    update_weight_scales(model)
    return model.token_losses(batch.tokens, batch.positions, batch.layout, batch.loss_on)


@torch.no_grad()
def most_likely_tokens(model: Transformer, batch: Batch) -> Tensor:
    """The most likely next token at each token in `batch.loss_index`, int64 [n]."""
    update_weight_scales(model)
    _, rows_n, _ = batch.loss_on
    return model(batch.tokens, batch.positions, batch.layout, rows_n).float().argmax(-1)
