"""Output projection and cross entropy, only on tokens that carry loss, a chunk of them at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once: 2 GiB in float32 at a vocabulary of 128K."""

ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Weighted sum of the losses of hidden states [n, D] by a weight [V, D], labels int64 [n] and weights float32 [n]."""


def chunk_loss(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """The weighted sum of the losses of a chunk, a float32 scalar. A `ChunkLoss`."""
    return (_cross_entropy(hidden_nD, weight_VD, labels_n) * weights_n).sum()


class CompiledChunkLoss:
    """`chunk_loss` by torch.compile, which makes no float32 logits: of Llama-3-8B's 8K tokens it saves 13 of 66 ms and
    3.9 of 6.9 GiB (benchmarks/results/loss-compare-h200.json). A `ChunkLoss`.

    Rows are filled up to one of a few sizes, each compiled once. Code for a variable number of rows would depend on the
    first number that comes, so that a resumed run could compute other bits.
    """

    def __init__(self, **options: Any) -> None:
        """options: of torch.compile."""
        self._compiled = torch.compile(chunk_loss, dynamic=False, **options)

    def __call__(self, hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
        """The sum of `chunk_loss`."""
        missing = filled_rows(len(labels_n)) - len(labels_n)
        if missing:
            hidden_nD = F.pad(hidden_nD, (0, 0, 0, missing))
            labels_n, weights_n = (F.pad(x, (0, missing)) for x in (labels_n, weights_n))
        return self._compiled(hidden_nD, weight_VD, labels_n, weights_n)


def filled_rows(rows: int) -> int:
    """Rows of a chunk of `rows` that is filled up: an eighth, a quarter or a half of a complete chunk, or all of it."""
    return next(size for size in (CHUNK_TOKENS // part for part in (8, 4, 2, 1)) if rows <= size)


def weighted_loss_sum(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_n: Tensor,
    index_n: Tensor,
    weights_n: Tensor,
    of_chunk: ChunkLoss = chunk_loss,
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
        total = total + checkpoint(of_chunk, hidden, weight_VD, labels, weights, use_reentrant=False)
    return total


@torch.no_grad()
def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_n: Tensor, index_n: Tensor) -> Tensor:
    """Loss (nats) of each token, float32 [n], for evaluation: without gradient, a chunk of logits at a time.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden`; labels int64 [n] belong to those rows.
    """
    chunks = zip(index_n.split(CHUNK_TOKENS), labels_n.split(CHUNK_TOKENS), strict=True)
    return torch.cat([_cross_entropy(hidden_TD[index], weight_VD, labels) for index, labels in chunks])


def _cross_entropy(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_nD, weight_VD).float(), labels_n, reduction="none")
