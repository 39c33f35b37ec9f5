"""One micro-batch as tensors: samples packed end to end, without a batch dimension."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moba_train.attention.protocol import Layout, packed_layout
from moba_train.data.samples import Sample, Span


@dataclass(frozen=True)
class Batch:
    """The samples of one micro-batch, T tokens in all, of which n carry loss."""

    tokens: Tensor
    """int64 [T]"""
    labels: Tensor
    """int64 [T]; 0 where there is no loss."""
    positions: Tensor
    """int64 [T]: place of each token in its document piece."""
    layout: Layout
    """Document boundaries: every document piece attends to itself alone."""
    loss_index: Tensor
    """int64 [n]: the tokens whose prediction counts. Never empty, so that every rank runs the same graph: without any,
    it is [first_row] with weight 0."""
    loss_weight: Tensor
    """float32 [n]: weight of each of these predictions."""
    loss_weight_sum: float
    """Sum of the weights: what the loss sum is to be divided by, once it is summed over all batches and ranks."""
    loss_tokens: int
    """How many tokens carry loss; 0 where `loss_index` is only there for the graph."""
    pieces: list[Span]
    """The origin of each document piece, to find a bad batch's documents again."""
    piece_documents: list[int]
    """Its number among the layout's documents, of which some are padding."""
    padding: int
    """How many of the T tokens are no document's; they are pieces of their own, without loss."""
    first_row: int = 0
    """The first of the T that the model returns on this rank: under tensor parallelism, each rank has a stretch of
    them. `loss_index` counts from the first of all."""

    @property
    def loss_on(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the model needs for the loss: labels int64 [n], their rows among those that it returns int64 [n], their
        weights float32 [n]."""
        return self.labels[self.loss_index], self.loss_index - self.first_row, self.loss_weight

    def with_loss_on(self, index: Tensor, weight: Tensor, first_row: int = 0) -> "Batch":
        """The same tokens with loss on those of `index` alone, int64 [n], by `weight`, float32 [n], on the CPU; n may
        be 0. `first_row`: as in the result."""
        weight_sum, tokens = float(weight.sum(dtype=torch.float64)), int(weight.count_nonzero())
        if not index.numel():
            index, weight = torch.tensor([first_row]), torch.zeros(1)
        return dataclasses.replace(
            self,
            loss_index=index,
            loss_weight=weight,
            loss_weight_sum=weight_sum,
            loss_tokens=tokens,
            first_row=first_row,
        )

    def to(self, device: torch.device | str) -> "Batch":
        """This batch on `device`; copies to a GPU are asynchronous, from pinned memory."""

        def move(tensor: Tensor) -> Tensor:
            if torch.device(device).type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return dataclasses.replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=move(self.positions),
            layout=dataclasses.replace(self.layout, cu_seqlens=move(self.layout.cu_seqlens)),
            loss_index=move(self.loss_index),
            loss_weight=move(self.loss_weight),
        )


def collate(samples: Sequence[Sample]) -> Batch:
    """One micro-batch, on the CPU, of one or more samples in their order."""
    lengths = [length for sample in samples for length in sample.lengths]
    weight = np.concatenate([sample.loss_weight for sample in samples])
    loss_index = np.flatnonzero(weight)
    ends = np.cumsum([len(sample.lengths) for sample in samples])
    firsts = zip(ends - [len(sample.lengths) for sample in samples], samples, strict=True)
    piece_documents = [int(first) + i for first, sample in firsts for i in range(len(sample.pieces))]
    if not loss_index.size:
        loss_index = np.zeros(1, dtype=np.int64)
    return Batch(
        tokens=torch.from_numpy(np.concatenate([sample.tokens for sample in samples])),
        labels=torch.from_numpy(np.concatenate([sample.labels for sample in samples])),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        layout=packed_layout(lengths),
        loss_index=torch.from_numpy(loss_index),
        loss_weight=torch.from_numpy(weight[loss_index]),
        loss_weight_sum=float(weight.sum(dtype=np.float64)),
        loss_tokens=int(np.count_nonzero(weight)),
        pieces=[piece for sample in samples for piece in sample.pieces],
        piece_documents=piece_documents,
        padding=sum(sample.padding for sample in samples),
    )
