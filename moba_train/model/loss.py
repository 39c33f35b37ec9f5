"""Output projection and cross entropy, only on tokens that carry loss, a chunk of them at a time.

A chunk's gradients are computed with its loss, so that its logits are neither kept nor computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once, or more (`chunk_tokens`): 2 GiB in float32 at a vocabulary of 128K."""
CHUNK_LOGITS = 1 << 28
"""Logits that may exist at once where more than `CHUNK_TOKENS` are taken: 1 GiB in float32."""
MOST_CHUNK_TOKENS = 1 << 15
"""Tokens of a chunk at most, however small the vocabulary."""

LossTokens = tuple[Tensor, Tensor, Tensor]
"""Labels int64 [n], the rows that they belong to int64 [n], and their weights float32 [n]."""
ChunkLoss = Callable[..., Tensor]
"""Weighted sum of the losses of hidden states [n, D] by a weight [V, D], labels int64 [n], weights float32 [n], and
what else belongs to these rows."""


class LossSums(NamedTuple):
    """Sums over the loss tokens of a micro-batch, each weighted."""

    loss: Tensor
    """Cross entropy in nats, a float32 scalar."""
    auxiliary: Tensor | None
    """Auxiliary losses of the layers' attention kinds, float32 [layers], 0 for layers without; None without any."""

    @property
    def total(self) -> Tensor:
        """The sum that training minimises."""
        return self.loss if self.auxiliary is None else self.loss + self.auxiliary.sum()


def auxiliary_sums(auxiliary: Sequence[Tensor | None], loss_tokens: LossTokens) -> Tensor | None:
    """Weighted sums over the loss tokens, float32 [layers]; None when no layer has an auxiliary loss."""
    _, index_n, weights_n = loss_tokens
    if all(auxiliary_T is None for auxiliary_T in auxiliary):
        return None
    nothing = weights_n.new_zeros(())
    sums = [nothing if loss_T is None else (loss_T[index_n] * weights_n).sum() for loss_T in auxiliary]
    return torch.stack(sums)


def chunk_loss(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """The weighted sum of the losses of a chunk, a float32 scalar. A `ChunkLoss`."""
    return (_cross_entropy(hidden_nD, weight_VD, labels_n) * weights_n).sum()


class CompiledChunkLoss:
    """`chunk_loss` by torch.compile, which makes no float32 logits: of Llama-3-8B's 8K tokens it saves 8 of 50 ms and
    3.9 of 6.9 GiB (benchmarks/results/loss-compare-h200-logits-once.json). A `ChunkLoss`.

    Rows are filled up to one of a few sizes, each compiled once. Code for a variable number of rows would depend on the
    first number that comes, so that a resumed run could compute other bits.
    """

    def __init__(self, **options: Any) -> None:
        """options: of torch.compile."""
        self._compiled = torch.compile(chunk_loss, dynamic=False, **options)

    def __call__(self, hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
        """The sum of `chunk_loss`."""
        # Rows of weight 0 add nothing to loss and gradients.
        missing = filled_rows(len(labels_n)) - len(labels_n)
        if missing:
            hidden_nD = F.pad(hidden_nD, (0, 0, 0, missing))
            labels_n, weights_n = (F.pad(x, (0, missing)) for x in (labels_n, weights_n))
        return self._compiled(hidden_nD, weight_VD, labels_n, weights_n)


def chunk_tokens(vocab_size: int) -> int:
    """Tokens whose logits exist at once: a power of two, more for a small vocabulary, as each chunk costs the host 2 ms
    of a step (an H100's host, benchmarks/LOG.md)."""
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
    further: tuple[Tensor, ...] = (),
) -> Tensor:
    """Sum of the weighted token losses (nats), a float32 scalar. The trainer gives weights that add up to one over all
    ranks: another factor of the sum would round the gradients once more, which are in the dtype of `hidden`.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden` that carry loss; labels int64 [n], weights float32
    [n] and `further` arguments of `of_chunk`, [n, ...], belong to those rows. Differentiable in hidden and weight;
    logits never exist for all tokens.
    """
    if torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad):
        return cast(Tensor, _LossSum.apply(hidden_TD, weight_VD, labels_n, index_n, weights_n, of_chunk, *further))
    chunks = _chunks(len(weight_VD), index_n, labels_n, weights_n, *further)
    return torch.stack([of_chunk(hidden_TD.index_select(0, index), weight_VD, *loss) for index, *loss in chunks]).sum()


def _chunks(vocab_size: int, *by_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The chunks of tensors with a value for each row; an empty one where there are no rows."""
    return zip(*(x.split(chunk_tokens(vocab_size)) for x in by_row), strict=True)


class _LossSum(torch.autograd.Function):
    """The sum with its gradients, added up over the chunks; its backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_n: Tensor,
        index_n: Tensor,
        weights_n: Tensor,
        of_chunk: ChunkLoss,
        *further: Tensor,
    ) -> Tensor:
        total = hidden_TD.new_zeros((), dtype=torch.promote_types(hidden_TD.dtype, torch.float32))
        hidden_needed, weight_needed, *_ = ctx.needs_input_grad
        dhidden_TD = torch.zeros_like(hidden_TD) if hidden_needed else None
        dweight_VD: Tensor | None = None
        for index, *loss_on in _chunks(len(weight_VD), index_n, labels_n, weights_n, *further):
            hidden_nD = hidden_TD.index_select(0, index).requires_grad_(hidden_needed)
            # A new leaf for each chunk, or the graph would reach back into the model.
            weight = weight_VD.detach().requires_grad_(weight_needed)
            with torch.enable_grad():
                loss = of_chunk(hidden_nD, weight, *loss_on)
                # Logits once, three products instead of four: 8K tokens of a vocabulary of 128,256 take 42.1 ms where
                # 53.6 were measured (benchmarks/results/loss-compare-h200-logits-once.json, loss-compare-h200.json).
                gradients = list(torch.autograd.grad(loss, [x for x in (hidden_nD, weight) if x.requires_grad]))
            total += loss.detach()
            if dhidden_TD is not None:
                dhidden_TD.index_add_(0, index, gradients.pop(0))
            if weight_needed:
                dweight_VD = gradients.pop() if dweight_VD is None else dweight_VD.add_(gradients.pop())
        ctx.save_for_backward(dhidden_TD, dweight_VD)
        ctx.others = [None] * (4 + len(further))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: a pipeline may take the gradients of activations and of weights apart.
        gradients = (None if gradient is None else gradient * dtotal for gradient in ctx.saved_tensors)
        return (*gradients, *ctx.others)


@torch.no_grad()
def token_losses(hidden_TD: Tensor, weight_VD: Tensor, labels_n: Tensor, index_n: Tensor) -> Tensor:
    """Loss (nats) of each token, float32 [n], for evaluation: without gradient, a chunk of logits at a time.

    hidden [T, D]; weight [V, D]; index int64 [n]: rows of `hidden`; labels int64 [n] belong to those rows.
    """
    chunks = _chunks(len(weight_VD), index_n, labels_n)
    return torch.cat([_cross_entropy(hidden_TD[index], weight_VD, labels) for index, labels in chunks])


def _cross_entropy(hidden_nD: Tensor, weight_VD: Tensor, labels_n: Tensor) -> Tensor:
    logits_nV = F.linear(hidden_nD, weight_VD).to(torch.promote_types(hidden_nD.dtype, torch.float32))
    return F.cross_entropy(logits_nV, labels_n, reduction="none")
