"""The only calls of the model, one function for each use, so that a pipeline can take the model's place here."""

import torch
from torch import Tensor

from moba_train.data.batch import Batch
from moba_train.model.transformer import Transformer


def training_loss(model: Transformer, batch: Batch) -> Tensor:
    """Sum of the weighted token losses (nats) of this rank's part of a micro-batch, a float32 scalar with gradient."""
    return model(batch.tokens, batch.positions, batch.layout, batch.loss_on)


@torch.no_grad()
def token_losses(model: Transformer, batch: Batch) -> Tensor:
    """The loss (nats) of each token in `batch.loss_index`, float32 [n], not weighted, without gradient."""
    return model(batch.tokens, batch.positions, batch.layout, batch.loss_on, per_token=True)
