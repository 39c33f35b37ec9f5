"""Output projection and cross entropy, only on tokens that carry loss, a chunk of them at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once: 2 GiB in float32 at a vocabulary of 128K."""


def weighted_loss_sum(
    hidden_TD: Tensor, weight_VD: Tensor, labels_n: Tensor, index_n: Tensor, weights_n: Tensor
) -> Tensor:
    """Sum of the weighted token losses (nats), a float32 scalar. The trainer divides it by the weights of all ranks.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden` that carry loss; labels int64 [n] and weights
    float32 [n] belong to those rows. Logits are recomputed in the backward pass, so they never exist for all tokens.
    """
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    for index, labels, weights in zip(
        index_n.split(CHUNK_TOKENS), labels_n.split(CHUNK_TOKENS), weights_n.split(CHUNK_TOKENS), strict=True
    ):
        hidden = hidden_TD.index_select(0, index)
        total = total + checkpoint(_weighted_chunk, hidden, weight_VD, labels, weights, use_reentrant=False)
    return total


@torch.no_grad()
def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_n: Tensor, index_n: Tensor) -> Tensor:
    """Loss (nats) of each token, float32 [n], for evaluation: without gradient, a chunk of logits at a time.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden`; labels int64 [n] belong to those rows.
    """
    chunks = zip(index_n.split(CHUNK_TOKENS), labels_n.split(CHUNK_TOKENS), strict=True)
    return torch.cat([_cross_entropy(hidden_TD[index], weight_VD, labels) for index, labels in chunks])


def _weighted_chunk(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    return (_cross_entropy(hidden_nD, weight_VD, labels_n) * weights_n).sum()


def _cross_entropy(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_nD, weight_VD).float(), labels_n, reduction="none")
