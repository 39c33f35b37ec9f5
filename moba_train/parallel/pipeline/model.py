"""Pipeline parallelism: layers of each rank, and a model that has one rank's layers.

The layers are cut into parts of consecutive ones, and part i is on rank i % pp: with as many parts as ranks, each rank
has one; with more of them (interleaved schedules), a rank has several that lie apart.

Only hidden states [T, D] travel from rank to rank: each rank has the tokens, document boundaries and loss tokens of a
micro-batch from the data. The model runs one pass of one micro-batch, for evaluation; training runs many at once
(schedule.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import ParallelConfig, PipelineSchedule
from moba_train.model.loss import LossSums, LossTokens, auxiliary_sums
from moba_train.model.part import ModelPart, cut_to_part
from moba_train.model.transformer import Transformer

AUTO_INTERLEAVED = 2
"""Parts of each rank with `pp_schedule: interleaved_1f1b` and `pp_layers: auto`."""


def number_of_parts(parallel: ParallelConfig) -> int:
    """Number of parts into which the layers are cut."""
    if parallel.pp_layers != "auto":
        return len(parallel.pp_layers)
    return parallel.pp * (AUTO_INTERLEAVED if parallel.pp_schedule == "interleaved_1f1b" else 1)


def balanced_split(costs: Sequence[float], output_cost: float, parts: int) -> tuple[int, ...]:
    """Number of layers in each of `parts` parts, at least one: the split whose most expensive part costs least.

    `costs`: of each layer, at least as many as parts; `output_cost`: of the output projection, which is in the last
    part. Among such splits it is the one whose costs have the smallest sum of squares.
    """
    layers = len(costs)
    before = [0.0, *accumulate(costs)]

    def cost(part: int, first: int, stop: int) -> float:
        return before[stop] - before[first] + (output_cost if part == parts - 1 else 0.0)

    def best(limit: float, combine: str) -> tuple[float, tuple[int, ...]]:
        """The least maximum (`combine` "max") or sum of squares of costs up to `limit`, and the counts of layers."""
        found: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
        for part in range(parts):
            ends: dict[int, tuple[float, tuple[int, ...]]] = {}
            for first, (value, counts) in found[-1].items():
                for stop in range(first + 1, layers - (parts - part - 1) + 1):
                    own = cost(part, first, stop)
                    if own > limit:
                        continue
                    total = max(value, own) if combine == "max" else value + own**2
                    if stop not in ends or total < ends[stop][0]:
                        ends[stop] = (total, (*counts, stop - first))
            found.append(ends)
        return found[-1][layers]

    least, _ = best(float("inf"), "max")
    return best(least * (1 + 1e-9), "squares")[1]


def model_parts(counts: Sequence[int]) -> list[ModelPart]:
    """The parts with these numbers of layers."""
    edges = [0, *accumulate(counts)]
    last = len(counts) - 1
    return [
        ModelPart(tuple(range(first, stop)), part == 0, part == last)
        for part, (first, stop) in enumerate(pairwise(edges))
    ]


def rank_part(parts: Sequence[ModelPart]) -> ModelPart:
    """The part of a rank that has these parts."""
    layers = tuple(layer for part in parts for layer in part.layers)
    return ModelPart(layers, any(part.has_embedding for part in parts), any(part.has_output for part in parts))


class PipelinePlace(NamedTuple):
    """A rank's place in its pipeline."""

    group: dist.ProcessGroup
    """The ranks of the pipeline, first layers first."""
    parts: tuple[ModelPart, ...]
    """The parts of the model; part i is on rank i % pp."""
    schedule: PipelineSchedule
    dtype: torch.dtype
    """Dtype of hidden states."""
    tp: int
    """Ranks that share the rows of hidden states."""

    @property
    def rank(self) -> int:
        """This rank's number in the pipeline."""
        return self.group.rank()

    @property
    def own(self) -> tuple[int, ...]:
        """Numbers of this rank's parts, in ascending order."""
        return tuple(range(self.rank, len(self.parts), self.group.size()))

    def rank_of(self, part: int) -> int:
        """Global rank that has a part."""
        return dist.get_global_rank(self.group, part % self.group.size())


class PipelineModel(Transformer):
    """The parts of one rank. Its methods are called on all ranks of the pipeline together, with the same micro-batch;
    results are those of the rank that computes the loss, and zero on all others."""

    def __init__(
        self, config: ModelConfig, kind_parameters: Sequence[Mapping[str, nn.Module]], place: PipelinePlace
    ) -> None:
        super().__init__(config, kind_parameters)
        cut_to_part(self, rank_part([place.parts[number] for number in place.own]))
        self.place = place
        self.training_schedule: object = None
        """State that schedule.py keeps from step to step, while the attention is the same."""

    def set_attention(self, kinds: Iterable[AttentionKind]) -> None:
        """Set the attention kind of every block of the whole model, first to last; the next training step compiles the
        rank's parts again."""
        super().set_attention(kinds)
        self.training_schedule = None

    def blocks_of(self, part: int) -> list[nn.Module]:
        """The blocks of one of this rank's parts."""
        return [self.blocks.get_submodule(str(layer)) for layer in self.place.parts[part].layers]

    def parameters_of(self, part: int) -> Iterator[nn.Parameter]:
        """The parameters of one of this rank's parts."""
        own = self.place.parts[part]
        for block in self.blocks_of(part):
            yield from block.parameters()
        if own.has_embedding or (own.has_output and self.output is None):
            yield from self.embedding.parameters()
        if own.has_output:
            yield from self.norm.parameters()
        if own.has_output and self.output is not None:
            yield from self.output.parameters()

    def rows(self, tokens_T: Tensor) -> int:
        """Rows of a micro-batch's hidden states on this rank."""
        return len(tokens_T) // self.place.tp

    def last_hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor | None:
        """Normalised residual stream after the last block, [T, D], where that is; None on all other ranks."""
        for number in self.place.own:
            part = self.place.parts[number]
            x_TD = self.embed(tokens_T) if part.has_embedding else self._receive(number - 1, tokens_T)
            x_TD, _ = self.run_blocks(self.blocks_of(number), x_TD, positions_T, layout)
            if part.has_output:
                return self.normalised(x_TD)
            # Blocking, one micro-batch at a time: evaluations need no schedule.
            dist.send(x_TD.contiguous(), self.place.rank_of(number + 1), self.place.group)
        return None

    def _receive(self, part: int, tokens_T: Tensor) -> Tensor:
        shape = (self.rows(tokens_T), self.config.hidden_size)
        x_TD = torch.empty(shape, dtype=self.place.dtype, device=tokens_T.device)
        dist.recv(x_TD, self.place.rank_of(part), self.place.group)
        return x_TD

    @torch.no_grad()
    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, rows_n: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the rows `rows_n` (all when None), without gradient; [n, 1] where the loss is not."""
        hidden_TD = self.last_hidden(tokens_T, positions_T, layout)
        if hidden_TD is None:
            rows = self.rows(tokens_T) if rows_n is None else len(rows_n)
            return torch.zeros(rows, 1, dtype=self.place.dtype, device=tokens_T.device)
        return self.logits(hidden_TD, rows_n)

    @torch.no_grad()
    def loss(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> LossSums:
        """Weighted sum of the losses of the rows in `loss_tokens`, without gradient and auxiliary losses."""
        hidden_TD = self.last_hidden(tokens_T, positions_T, layout)
        if hidden_TD is None:
            return LossSums(torch.zeros((), device=tokens_T.device), None)
        return LossSums(self.loss_sum(hidden_TD, loss_tokens), None)

    @torch.no_grad()
    def token_losses(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> Tensor:
        """Loss (nats) of each row in `loss_tokens`, float32 [n], unweighted, without gradient."""
        hidden_TD = self.last_hidden(tokens_T, positions_T, layout)
        if hidden_TD is None:
            return torch.zeros(len(loss_tokens[1]), device=tokens_T.device)
        return self.losses(hidden_TD, loss_tokens)

    def run_part(
        self, part: int, x_TD: Tensor, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens
    ) -> tuple[Tensor, LossSums]:
        """One part of the forward pass in training: the residual stream after it [T, D], and what it adds to the sums.

        x: the residual stream before it, which the first part does not read. The last part gives no residual stream,
        but the loss. Gradients flow from both.
        """
        place = self.place.parts[part]
        if place.has_embedding:
            x_TD = self.embed(tokens_T)
        x_TD, auxiliary = self.run_blocks(self.blocks_of(part), x_TD, positions_T, layout)
        loss = torch.zeros((), device=tokens_T.device)
        if place.has_output:
            loss = self.loss_sum(self.normalised(x_TD), loss_tokens)
        return x_TD, LossSums(loss, auxiliary_sums(auxiliary, loss_tokens))
