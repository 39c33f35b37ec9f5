"""One micro-batch as tensors: samples packed end to end, without a batch dimension."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moba_train.attention.layout import Layout, packed_layout
from moba_train.data.samples import Sample
from moba_train.data.stream import DocumentPart


@dataclass(frozen=True)
class Batch:
    """The samples of one micro-batch: T tokens in total, n of which carry loss."""

    tokens: Tensor
    """int64 [T]"""
    labels: Tensor
    """int64 [T]; 0 for tokens without loss."""
    positions: Tensor
    """int64 [T]: position of each token within its document part."""
    layout: Layout
    """Document boundaries: attention stays within a document part."""
    loss_index: Tensor
    """int64 [n]: indices of the tokens whose predictions carry loss. Never empty, so that every rank runs the same
    graph: [first_row] with weight 0 stands for no loss."""
    loss_weight: Tensor
    """float32 [n]: weight of each of these predictions."""
    loss_weight_sum: float
    """Sum of the weights. The loss sum is divided by its total over all batches and ranks."""
    loss_tokens: int
    """Number of tokens that carry loss; 0 if `loss_index` holds only its placeholder."""
    parts: list[DocumentPart]
    """Origin of each document part; it leads from a bad batch to its documents."""
    part_documents: list[int]
    """Index of each document part among the layout's documents, which also include the padding."""
    padding: int
    """Padding tokens among the T. The padding of each sample is a separate document in `layout`, without loss."""
    first_row: int = 0
    """Row offset of this rank's logits: row i of the model's output belongs to token first_row + i. It differs from 0
    only under tensor parallelism, with which each rank computes the logits of a range of tokens. `loss_index` counts
    from token 0."""

    @property
    def loss_on(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of the model's loss: labels int64 [n], rows of this rank's logits int64 [n], weights fp32 [n]."""
        return self.labels[self.loss_index], self.loss_index - self.first_row, self.loss_weight

    def with_loss_on(self, index: Tensor, weight: Tensor, first_row: int = 0) -> "Batch":
        """This batch with loss only on the tokens `index`, int64 [n], with weights `weight`, float32 [n]; n may be 0.

        Both must be on the CPU. `first_row` is that of the result.
        """
        # On the host, so that the step's total is known before the forward pass.
        weight_sum = float(weight.sum(dtype=torch.float64))
        tokens = int(weight.count_nonzero())
        if not index.numel():
            index = torch.tensor([first_row])
            weight = torch.zeros(1)
        return dataclasses.replace(
            self,
            loss_index=index,
            loss_weight=weight,
            loss_weight_sum=weight_sum,
            loss_tokens=tokens,
            first_row=first_row,
        )

    def with_weights_divided_by(self, divisor: float) -> "Batch":
        """This batch with weights / `divisor`. With the sum over all ranks, loss sums become parts of a mean loss."""
        return dataclasses.replace(
            self, loss_weight=self.loss_weight / divisor, loss_weight_sum=self.loss_weight_sum / divisor
        )

    def to(self, device: torch.device | str) -> "Batch":
        """This batch on `device`; copies to a GPU start from pinned memory and are asynchronous."""

        def move(tensor: Tensor) -> Tensor:
            if torch.device(device).type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return dataclasses.replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=move(self.positions),
            # The layout's copy on the host stays there: shapes are computed from it without waiting for the GPU.
            layout=dataclasses.replace(self.layout, cu_seqlens=move(self.layout.cu_seqlens)),
            loss_index=move(self.loss_index),
            loss_weight=move(self.loss_weight),
        )


def collate(samples: Sequence[Sample]) -> Batch:
    """One micro-batch, on the CPU, of one or more samples, concatenated in order."""
    lengths = [length for sample in samples for length in sample.lengths]
    weight = np.concatenate([sample.loss_weight for sample in samples])
    loss_index = np.flatnonzero(weight)
    ends = np.cumsum([len(sample.lengths) for sample in samples])
    firsts = zip(ends - [len(sample.lengths) for sample in samples], samples, strict=True)
    part_documents = [int(first) + i for first, sample in firsts for i in range(len(sample.parts))]
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
        parts=[part for sample in samples for part in sample.parts],
        part_documents=part_documents,
        padding=sum(sample.padding for sample in samples),
    )
