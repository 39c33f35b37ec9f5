"""A Llama-style decoder on one device. Parallelism is applied to it from outside.

Shape suffixes: T packed tokens, D hidden size, H query heads, K key/value heads, d head width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.engine import Engine
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout
from moba_train.config.model import LayerRope, ModelConfig, RopeConfig
from moba_train.model.adapters import Adapters
from moba_train.model.block import Attention, Block, norm_of
from moba_train.model.loss import (
    ChunkLoss,
    LossSums,
    LossTokens,
    auxiliary_sums,
    capped,
    chunk_loss,
    token_losses,
    weighted_loss_sum,
)
from moba_train.model.objective import Objective
from moba_train.model.rope import rope_cos_sin

T = TypeVar("T")


class Transformer(nn.Module):
    """Embedding, blocks, norm and output projection over one packed sequence of documents.

    A micro-batch of several samples is a longer packed sequence: the document boundaries in `layout` keep them apart.
    The model has three uses, each a method of its own, and FSDP treats all three as forward passes: `forward` returns
    logits, `loss` the sums that training minimises, and `token_losses` the losses that evaluation reports.
    """

    def __init__(self, config: ModelConfig, kind_parameters: Sequence[Mapping[str, nn.Module]] = ()) -> None:
        """kind_parameters: for each layer, the parameter modules of its attention kinds by the kind's name."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList()
        for layer in range(config.layers):
            self.blocks.append(Block(config, layer, kind_parameters[layer] if kind_parameters else {}))
        self.norm = norm_of(config, config.hidden_size)
        self.set_rope(config.rope)
        tied = config.tie_embeddings
        self.output = None if tied else OutputProjection(config.hidden_size, config.vocab_size, bias=False)
        self.gather_output_weight: Callable[[Tensor], Tensor] | None = None
        """Makes the output projection's whole weight of this rank's part of it (parallel/tensor.py)."""
        self.chunk_loss: ChunkLoss = chunk_loss
        self.adapters: Adapters | None = None
        """Added modules that are trained instead of the model's own; set where the model is built."""
        self.largest_lse: Any = None
        """`parallel.largest_lse.LargestLse` of a model that trains."""
        self.objective: Objective | None = None
        """Minimised instead of the cross entropy; set from outside, may change between steps."""

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, rows_n: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the rows `rows_n` (all when None), in the compute dtype. tokens, positions int64 [T]."""
        hidden_TD, _ = self.hidden(tokens_T, positions_T, layout)
        return self.logits(hidden_TD, rows_n)

    def loss(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> LossSums:
        """Weighted sums of the losses of the rows in `loss_tokens`, with gradient."""
        prepared = self.objective.prepare(self, loss_tokens, tokens_T, positions_T, layout) if self.objective else ()
        hidden_TD, auxiliary = self.hidden(tokens_T, positions_T, layout)
        loss = self.loss_sum(hidden_TD, loss_tokens, prepared)
        return LossSums(loss, auxiliary_sums(auxiliary, loss_tokens))

    def token_losses(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> Tensor:
        """Loss (nats) of each row in `loss_tokens`, float32 [n], unweighted, without gradient."""
        hidden_TD, _ = self.hidden(tokens_T, positions_T, layout)
        return self.losses(hidden_TD, loss_tokens)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> tuple[Tensor, list[Tensor | None]]:
        """Normalised residual stream after the last block, [T, D], and the auxiliary losses of each layer, [T]."""
        x_TD, auxiliary = self.run_blocks(self.blocks, self.embed(tokens_T), positions_T, layout)
        return self.normalised(x_TD), auxiliary

    def embed(self, tokens_T: Tensor) -> Tensor:
        """The residual stream before the first block, [T, D]."""
        scale = self.config.embedding_scale
        x_TD: Tensor = self.embedding(tokens_T)
        return x_TD if scale == 1 else scale * x_TD

    def normalised(self, x_TD: Tensor) -> Tensor:
        """Normalised residual stream [T, D] after the last block, as logits, scaled, are made of it."""
        divisor = self.config.logits_divisor
        x_TD = self.norm(x_TD)
        return x_TD if divisor == 1 else x_TD / divisor

    def run_blocks(
        self, blocks: Iterable[nn.Module], x_TD: Tensor, positions_T: Tensor, layout: Layout
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Residual stream after these blocks, [T, D], given the one before them, and their auxiliary losses, [T]."""
        # Once for all blocks with one embedding, from positions instead of a table: a document may be as long as the
        # sequence.
        angles: dict[LayerRope, tuple[Tensor, Tensor]] = {}
        auxiliary: list[Tensor | None] = []
        for block in blocks:
            rope = cast(Block, block).attention.rope
            if rope not in angles:
                angles[rope] = rope_cos_sin(positions_T, rope, self.config.head_width)
            x_TD, auxiliary_T = block(x_TD, *angles[rope], layout)
            auxiliary.append(auxiliary_T)
        return x_TD, auxiliary

    def logits(self, hidden_TD: Tensor, rows_n: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the rows `rows_n` (all when None), in the compute dtype, from the normalised residual stream
        [T, D]."""
        hidden_nD = hidden_TD if rows_n is None else hidden_TD[rows_n]
        return capped(self._with_output_weight(partial(F.linear, hidden_nD)), self.config.logits_cap)

    def loss_sum(self, hidden_TD: Tensor, loss_tokens: LossTokens, prepared: tuple[Tensor, ...] = ()) -> Tensor:
        """Weighted sum of the losses of the rows in `loss_tokens`, from the normalised residual stream; that of the
        objective for what it has `prepared`."""
        cap = self.config.logits_cap
        of_chunk = self.chunk_loss if cap is None else partial(self.chunk_loss, cap=cap)
        if self.objective is not None and prepared:
            of_chunk = self.objective.of_chunk
        return self._with_output_weight(
            lambda weight_VD: weighted_loss_sum(hidden_TD, weight_VD, *loss_tokens, of_chunk, prepared)
        )

    def losses(self, hidden_TD: Tensor, loss_tokens: LossTokens) -> Tensor:
        """Loss (nats) of each row in `loss_tokens`, float32 [n], unweighted, without gradient, from the normalised
        residual stream [T, D]."""
        labels_n, index_n, _ = loss_tokens
        cap = self.config.logits_cap
        return self._with_output_weight(lambda weight_VD: token_losses(hidden_TD, weight_VD, labels_n, index_n, cap))

    def _with_output_weight(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of `use` for the weight of the output projection, [V, D]; it is the embedding's own when tied.

        Under FSDP, called once after each call of the last norm, which gathers the weight with its own.
        """
        gather = self.gather_output_weight
        use_whole = use if gather is None else lambda weight_VD: use(gather(weight_VD))
        found: Tensor = use_whole(self.embedding.weight) if self.output is None else self.output(use_whole)
        return found

    def set_attention(self, kinds: Iterable[AttentionKind]) -> None:
        """Set the attention kind of every block of the whole model, first to last; may change between steps."""
        for attention, kind in self._attentions(kinds):
            attention.kind = kind

    def set_engines(self, engines: Iterable[Engine]) -> None:
        """Set the engine that runs the attention of every block of the whole model, first to last."""
        for attention, engine in self._attentions(engines):
            attention.engine = engine

    def set_rope(self, rope: RopeConfig) -> None:
        """Set the rotary embedding of all blocks; may change between steps."""
        for attention, of_layer in self._attentions(rope.by_layer(self.config.layers)):
            attention.rope = of_layer

    def attention_kinds(self) -> list[AttentionKind]:
        """The attention kind of every block here, first to last."""
        attentions = (attention for attention, _ in self._attentions([None] * self.config.layers))
        return [attention.kind for attention in attentions if attention.kind is not None]

    def _attentions(self, by_layer: Iterable[T]) -> Iterator[tuple[Attention, T]]:
        """The attention of each block here with the value of its layer, from those of all layers of the whole model."""
        by_number = dict(zip(range(self.config.layers), by_layer, strict=True))
        for number, block in self.blocks.named_children():
            yield cast(Block, block).attention, by_number[int(number)]


class OutputProjection(nn.Linear):
    """The output projection's weight [V, D], handed to a function in each call, as losses take a chunk of tokens at a
    time. The weight is used inside a call, so that FSDP's hooks gather it before and free it after the call and its
    backward pass (parallel/fsdp.py)."""

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]  # a use, not an input
        """The result of `use` for the weight [V, D]."""
        return use(self.weight)
