"""Training and measurement of a small model for benchmarks/sft_layers.py: batches in memory, AdamW, loss, gradients."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.recall_documents import Recall
from moba_train.attention.protocol import Layout, packed_layout
from moba_train.model.transformer import Transformer

NORMS_EVERY = 5
"""Steps between measurements of the gradient norms."""


class OutOfTimeError(Exception):
    """The deadline has passed in the middle of a run."""


@dataclass(frozen=True)
class Deadline:
    """A moment of `time.monotonic` at which runs end."""

    end: float

    def check(self) -> None:
        """Raise OutOfTimeError if the moment has passed."""
        if time.monotonic() > self.end:
            raise OutOfTimeError


@dataclass
class Documents:
    """Documents of one length in memory and the positions that carry loss, cut into batches."""

    tokens: Tensor
    """int64 [documents, length]"""
    loss_places: Tensor
    """int64 [n]: positions in each document of the tokens to be predicted; never 0."""
    batch: int
    layout: Layout
    positions: Tensor

    @classmethod
    def from_tokens(cls, tokens: Tensor, loss_places: Tensor, batch: int) -> "Documents":
        """Documents [documents, length] in batches of `batch`."""
        length = tokens.shape[1]
        device = tokens.device
        positions = torch.arange(length, device=device).repeat(batch)
        return cls(tokens, loss_places, batch, packed_layout([length] * batch, device), positions)

    def with_loss_everywhere(self) -> "Documents":
        """A copy in which all tokens but the first are to be predicted."""
        every = torch.arange(1, self.tokens.shape[1], device=self.tokens.device)
        return Documents(self.tokens, every, self.batch, self.layout, self.positions)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [T] of a batch, labels [n] and the rows [n] they are predicted from."""
        numbers = torch.arange(self.batch, device=self.tokens.device)
        tokens = self.tokens[(numbers + step * self.batch) % len(self.tokens)]
        starts = numbers[:, None] * tokens.shape[1]
        return tokens.flatten(), tokens[:, self.loss_places].flatten(), (starts + self.loss_places - 1).flatten()


def mean_loss(model: Transformer, documents: Documents, step: int) -> Tensor:
    """Mean loss of the loss tokens of one batch."""
    tokens, labels, rows = documents[step]
    weights = torch.full(rows.shape, 1 / rows.numel(), device=rows.device)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        return model.loss(tokens, documents.positions, documents.layout, (labels, rows, weights)).loss


def train(
    model: Transformer,
    documents: Documents,
    steps: int,
    lr: float,
    last_lr: float,
    deadline: Deadline,
    every: int,
    enough: Callable[[int], bool],
) -> Tensor:
    """Train with AdamW: warm-up over a tenth of the steps (100 at most), then a linear decay to `last_lr`.

    `enough` is called every `every` steps and ends the training when it returns True. Returns each layer's gradient
    norm (before clipping) in every fifth step, float32 [n, layers].
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=parameters[0].is_cuda)
    warm_up = min(100, max(1, steps // 10))
    fall = 1 - last_lr / lr
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - fall * max(0, step - warm_up) / max(1, steps - warm_up))
    )
    norms = []
    for step in range(steps):
        mean_loss(model, documents, step).backward()
        if step % NORMS_EVERY == 0:
            deadline.check()
            norms.append(torch.stack([torch.nn.utils.get_total_norm(_gradients(block)) for block in model.blocks]))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0 and enough(step + 1):
            break
    return torch.stack(norms)


def _gradients(module: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@torch.no_grad()
def evaluate(model: Transformer, documents: Documents, sizes: Recall) -> tuple[float, float]:
    """Mean loss (nats) of the loss tokens, and the fraction of the values among them that is predicted right."""
    losses = []
    right = []
    for step in range(len(documents.tokens) // documents.batch):
        tokens, labels, rows = documents[step]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            logits = model(tokens, documents.positions, documents.layout, rows_n=rows).float()
        losses.append(torch.nn.functional.cross_entropy(logits, labels))
        is_value = labels >= sizes.text_ids + sizes.keys
        right.append((logits.argmax(1) == labels)[is_value].float().mean())
    return torch.stack(losses).mean().item(), torch.stack(right).mean().item()


def gradient_reach(model: Transformer, documents: Documents) -> list[float]:
    """For each layer's input, the fraction of tokens whose gradient of one batch's loss is not zero."""
    inputs: list[Tensor] = []

    def keep(_module: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
        arguments[0].retain_grad()
        inputs.append(arguments[0])

    hooks = [block.register_forward_pre_hook(keep) for block in model.blocks]
    mean_loss(model, documents, 0).backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    return [(x.grad != 0).any(1).float().mean().item() for x in inputs if x.grad is not None]
