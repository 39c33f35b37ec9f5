"""A Llama-style decoder on one device. Parallelism is applied to it from outside.

Shape suffixes: T packed tokens, D hidden size, H query heads, K key/value heads, d head width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.kind import AttentionKind, Engine, LayerInput, SublayerInput
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.model.loss import ChunkLoss, chunk_loss, token_losses, weighted_loss_sum
from moba_train.model.rope import apply_rope, rope_cos_sin

T = TypeVar("T")

LossTokens = tuple[Tensor, Tensor, Tensor]
"""Labels int64 [n], the rows that they belong to int64 [n], and their weights float32 [n]."""


class Attention(nn.Module):
    """Grouped-query projections around an attention kind; the kind and the engine that runs it are set from outside."""

    def __init__(self, config: ModelConfig, kind_parameters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        width = config.head_width
        bias = config.qkv_bias
        self.head_dim = width
        self.q_proj = nn.Linear(config.hidden_size, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        for name, module in kind_parameters.items():
            self.add_module(name, module)
        self.kind: AttentionKind | None = None
        self.engine: Engine = LOCAL_ENGINE
        self.rope = config.rope

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """The layer's output [T, D] and, for kinds that have one, the auxiliary loss of each token, float32 [T]."""
        assert self.kind is not None
        q_THd = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKd = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKd = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        rotate = partial(apply_rope, cos=cos, sin=sin)
        layer = LayerInput(x_TD, q_THd, k_TKd, v_TKd, rotate, layout, self.engine, self._rotate_at)
        out_THd, auxiliary_T = self.kind.mix(layer, self._modules.get(self.kind.name))
        return self.o_proj(out_THd.flatten(1)), auxiliary_T

    def second_sublayer(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor | None:
        """The update [T, D] of the residual stream by the kind's second sublayer; None for kinds without one."""
        assert self.kind is not None
        layer = SublayerInput(x_TD, partial(apply_rope, cos=cos, sin=sin), layout, self.engine)
        return self.kind.second_sublayer(layer, self._modules.get(self.kind.name))

    def _rotate_at(self, x_nHd: Tensor, positions_n: Tensor) -> Tensor:
        return apply_rope(x_nHd, *rope_cos_sin(positions_n, self.rope, x_nHd.shape[-1]))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; a kind may have a sublayer between."""

    def __init__(self, config: ModelConfig, kind_parameters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, kind_parameters)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.feed_forward_rows: int | None = None
        """Rows that the feed-forward takes at once; None: all."""

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        # Read before anything is computed: torch.compile then never takes what it made for one kind for a layer of
        # another one. Where a kind cannot be traced as a whole, that would begin with code that asks for no kind, and a
        # block that is recomputed would be another one than the first time.
        if self.attention.kind is None or not self.attention.kind.name:
            raise RuntimeError("no attention kind set: call Transformer.set_attention first")
        update_TD, auxiliary_T = self.attention(self.attention_norm(x_TD), cos, sin, layout)
        x_TD = x_TD + update_TD
        second_TD = self.attention.second_sublayer(x_TD, cos, sin, layout)
        if second_TD is not None:
            x_TD = x_TD + second_TD
        rows = self.feed_forward_rows or len(x_TD)
        if len(x_TD) <= rows:
            return self._with_feed_forward(x_TD), auxiliary_T
        return torch.cat([self._with_feed_forward(part) for part in x_TD.split(rows)]), auxiliary_T

    def _with_feed_forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.feed_forward(self.feed_forward_norm(x_TD))


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


class OutputProjection(nn.Linear):
    """The output projection's weight [V, D], handed to a function in each call, as losses take a chunk of tokens at a
    time.

    The weight is used inside a call, so that FSDP's hooks gather it before and free it after the call and its backward
    pass (parallel/fsdp.py).
    """

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """What `use` returns for the weight [V, D]."""
        return use(self.weight)


class ModelPart(NamedTuple):
    """Which modules of the model a rank of a pipeline has."""

    layers: tuple[int, ...]
    """Numbers of its blocks, ascending."""
    has_embedding: bool
    has_output: bool
    """Whether it has the last norm and the output projection."""


class Transformer(nn.Module):
    """Embedding, blocks, norm and output projection over one packed sequence of documents.

    A micro-batch of several samples is a longer packed sequence: the document boundaries in `layout` keep them apart.
    The model has three uses, each a method of its own: `forward` returns logits, `loss` the sums that training
    minimises, and `token_losses` the losses that evaluation reports. FSDP treats all three as forward
    passes (parallel/fsdp.py).

    A part of the model, for a pipeline (parallel/pipeline), has some of the modules, under the names that they have in
    the whole model. With tied embeddings, the part with the output projection has a copy of the embedding for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind_parameters: Sequence[Mapping[str, nn.Module]] = (),
        part: ModelPart | None = None,
    ) -> None:
        """kind_parameters: for each layer, the parameter modules of its attention kinds by the kind's name. part: None
        for the whole model."""
        super().__init__()
        self.config = config
        self.rope = config.rope
        self.part = part or ModelPart(tuple(range(config.layers)), True, True)
        modules = kind_parameters or [{}] * config.layers
        tied = config.tie_embeddings
        if self.part.has_embedding or (tied and self.part.has_output):
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList()
        for layer in self.part.layers:
            self.blocks.add_module(str(layer), Block(config, modules[layer]))
        if self.part.has_output:
            self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        has_linear = self.part.has_output and not tied
        self.output = OutputProjection(config.hidden_size, config.vocab_size, bias=False) if has_linear else None
        self.gather_output_weight: Callable[[Tensor], Tensor] | None = None
        self.chunk_loss: ChunkLoss = chunk_loss

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole model, not a part of it."""
        return self.part.has_embedding and self.part.has_output and len(self.part.layers) == self.config.layers

    @property
    def copied_parameters(self) -> frozenset[str]:
        """Names of the parameters here that are copies of another part's."""
        copied = self.config.tie_embeddings and self.part.has_output and not self.part.has_embedding
        return frozenset({"embedding.weight"} if copied else ())

    def set_attention(self, kinds: Iterable[AttentionKind]) -> None:
        """Set the attention kind of every block of the whole model, first to last; may change between steps."""
        for attention, kind in self._with_own(kinds):
            attention.kind = kind

    def attention_kinds(self) -> list[AttentionKind]:
        """The attention kind of every block, first to last."""
        kinds = [attention.kind for attention in self._attentions()]
        return [kind for kind in kinds if kind is not None]

    def set_engines(self, engines: Iterable[Engine]) -> None:
        """Set the engine that runs the attention of every block of the whole model, first to last."""
        for attention, engine in self._with_own(engines):
            attention.engine = engine

    def _with_own(self, by_layer: Iterable[T]) -> Iterator[tuple[Attention, T]]:
        """The attention of each block here, with the value of its layer."""
        return zip(self._attentions(), self.of_own_layers(by_layer), strict=True)

    def of_own_layers(self, by_layer: Iterable[T]) -> list[T]:
        """The values that belong to the blocks here, from those of all layers of the whole model, first to last."""
        by_number = dict(zip(range(self.config.layers), by_layer, strict=True))
        return [by_number[layer] for layer in self.part.layers]

    def _attentions(self) -> Iterator[Attention]:
        return (module for module in self.modules() if isinstance(module, Attention))

    def set_gather_output_weight(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Set the function that gathers the full weight of the output projection from this rank's shard."""
        self.gather_output_weight = gather

    def set_rope(self, rope: RopeConfig) -> None:
        """Set the rotary embedding of all blocks; may change between steps."""
        self.rope = rope
        for attention in self._attentions():
            attention.rope = rope

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> tuple[Tensor, list[Tensor | None]]:
        """Normalised residual stream after the last block, [T, D], and the auxiliary losses of each layer, [T]."""
        x_TD, auxiliary = self.run_blocks(self.blocks, self.embedding(tokens_T), positions_T, layout)
        return self.norm(x_TD), auxiliary

    def run_blocks(
        self, blocks: Iterable[nn.Module], x_TD: Tensor, positions_T: Tensor, layout: Layout
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Residual stream after these blocks, [T, D], given the one before them, and their auxiliary losses, [T]."""
        cos, sin = rope_cos_sin(positions_T, self.rope, self.config.head_width)
        auxiliary: list[Tensor | None] = []
        for block in blocks:
            x_TD, auxiliary_T = block(x_TD, cos, sin, layout)
            auxiliary.append(auxiliary_T)
        return x_TD, auxiliary

    def loss_sum(self, hidden_TD: Tensor, loss_tokens: LossTokens) -> Tensor:
        """Weighted sum of the losses of the rows in `loss_tokens`, from the normalised residual stream."""
        return self.with_output_weight(
            lambda weight_VD: weighted_loss_sum(hidden_TD, weight_VD, *loss_tokens, of_chunk=self.chunk_loss)
        )

    def with_output_weight(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        """What `use` returns for the weight of the output projection, [V, D]; it is the embedding's own when tied.

        Under FSDP, once after each call of the last norm, which gathers the weight, too.
        """
        gather = self.gather_output_weight
        use_whole = use if gather is None else lambda weight_VD: use(gather(weight_VD))
        if self.output is None:
            return use_whole(self.embedding.weight)
        found: Tensor = self.output(use_whole)
        return found

    def logits(self, hidden_TD: Tensor, rows_n: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the rows `rows_n` (all when None), in the compute dtype, from the normalised residual stream
        [T, D]."""
        hidden_nD = hidden_TD if rows_n is None else hidden_TD[rows_n]
        return self.with_output_weight(partial(F.linear, hidden_nD))

    def losses(self, hidden_TD: Tensor, loss_tokens: LossTokens) -> Tensor:
        """Loss (nats) of each row in `loss_tokens`, float32 [n], unweighted, without gradient, from the normalised
        residual stream [T, D]."""
        labels_n, index_n, _ = loss_tokens
        return self.with_output_weight(lambda weight_VD: token_losses(hidden_TD, weight_VD, labels_n, index_n))

    def forward(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, rows_n: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the rows `rows_n` (all when None), in the compute dtype. tokens, positions int64 [T]."""
        hidden_TD, _ = self.hidden(tokens_T, positions_T, layout)
        return self.logits(hidden_TD, rows_n)

    def loss(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> LossSums:
        """Weighted sums of the losses of the rows in `loss_tokens`, with gradient."""
        hidden_TD, auxiliary = self.hidden(tokens_T, positions_T, layout)
        loss = self.loss_sum(hidden_TD, loss_tokens)
        return LossSums(loss, auxiliary_sums(auxiliary, loss_tokens))

    def token_losses(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout, loss_tokens: LossTokens) -> Tensor:
        """Loss (nats) of each row in `loss_tokens`, float32 [n], unweighted, without gradient."""
        hidden_TD, _ = self.hidden(tokens_T, positions_T, layout)
        return self.losses(hidden_TD, loss_tokens)


def auxiliary_sums(auxiliary: Sequence[Tensor | None], loss_tokens: LossTokens) -> Tensor | None:
    """Weighted sums over the loss tokens, float32 [layers]; None when no layer has an auxiliary loss."""
    _, index_n, weights_n = loss_tokens
    if all(auxiliary_T is None for auxiliary_T in auxiliary):
        return None
    nothing = weights_n.new_zeros(())
    sums = [nothing if loss_T is None else (loss_T[index_n] * weights_n).sum() for loss_T in auxiliary]
    return torch.stack(sums)
