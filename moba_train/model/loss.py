"""Output projection and cross entropy, only on tokens that carry loss, a chunk of them at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once, or more (`chunk_tokens`): 2 GiB in float32 at a vocabulary of 128K."""
CHUNK_LOGITS = 1 << 28
"""Logits that may exist at once where more than `CHUNK_TOKENS` are taken: 1 GiB in float32."""
MOST_CHUNK_TOKENS = 1 << 15
"""Tokens of a chunk at most, however small the vocabulary."""

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


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits exist at once: a power of two, more for a small vocabulary, as each chunk costs the host 2 ms
    of a step (an H100's host, docs/performance-log.md)."""
    fitting = 1 << (CHUNK_LOGITS // vocab_size).bit_length() >> 1
    return min(max(CHUNK_TOKENS, fitting), MOST_CHUNK_TOKENS)


def filled_rows(rows: int) -> int:
    """Rows of a chunk of `rows` that is filled up: a power of two, and at least an eighth of `CHUNK_TOKENS`."""
    return max(CHUNK_TOKENS // 8, 1 << (rows - 1).bit_length())


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
    rows = chunk_tokens(len(weight_VD))
    for index, *loss_on in zip(index_n.split(rows), labels_n.split(rows), weights_n.split(rows), strict=True):
        hidden = hidden_TD.index_select(0, index)
        total = total + checkpoint(of_chunk, hidden, weight_VD, *loss_on, use_reentrant=False, preserve_rng_state=False)
    return total


@torch.no_grad()
def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_n: Tensor, index_n: Tensor) -> Tensor:
    """Loss (nats) of each token, float32 [n], for evaluation: without gradient, a chunk of logits at a time.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden`; labels int64 [n] belong to those rows.
    """
    rows = chunk_tokens(len(weight_VD))
    chunks = zip(index_n.split(rows), labels_n.split(rows), strict=True)
    return torch.cat([_cross_entropy(hidden_TD[index], weight_VD, labels) for index, labels in chunks])


def _cross_entropy(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_nD, weight_VD).float(), labels_n, reduction="none")
