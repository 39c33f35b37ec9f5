"""The only places that call the model, one function for each use, so that a pipeline can replace the model here."""

import torch
from torch import Tensor

from moba_train.data.batch import Batch
from moba_train.model.transformer import Transformer


def training_loss(model: Transformer, batch: Batch) -> Tensor:
    """Sum of the weighted token losses (nats) of this rank's shard of a micro-batch, a float32 scalar with gradient."""
    return model(batch.tokens, batch.positions, batch.layout, batch.loss_on)


@torch.no_grad()
def token_losses(model: Transformer, batch: Batch) -> Tensor:
    """Loss (nats) of each of the n tokens in `batch.loss_index`, float32 [n], not weighted, without gradient."""
    return model(batch.tokens, batch.positions, batch.layout, batch.loss_on, per_token=True)
