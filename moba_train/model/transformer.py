"""A Llama-style decoder on one device. Parallelism is applied to it from outside.

Shape suffixes: T packed tokens, D hidden size, H query heads, K key/value heads, d head width, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.model.loss import token_losses, weighted_loss_sum
from moba_train.model.rope import apply_rope, rope_cos_sin

Engine = Callable[[Tensor, Tensor, Tensor, LocalAttention, Layout], tuple[Tensor, Tensor]]
"""Runs a LocalAttention on q [T, H, d], k and v [T, K, d]; returns out [T, H, d] and lse [H, T]."""


class Attention(nn.Module):
    """Grouped-query attention; which kind it is, and what runs it, is set from outside."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, bias = config.head_width, config.qkv_bias
        self.head_dim = width
        self.q_proj = nn.Linear(config.hidden_size, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width, config.norm_eps) if config.qk_norm else nn.Identity()
        self.kind: LocalAttention | None = None
        self.engine: Engine = LOCAL_ENGINE

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        if self.kind is None:
            raise RuntimeError("no attention chosen: call Transformer.set_attention first")
        q_THd = self.q_norm(self.q_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        k_TKd = self.k_norm(self.k_proj(x_TD).unflatten(-1, (-1, self.head_dim)))
        v_TKd = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        out_THd, _ = self.engine(apply_rope(q_THd, cos, sin), apply_rope(k_TKd, cos, sin), v_TKd, self.kind, layout)
        return self.o_proj(out_THd.flatten(1))


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
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), cos, sin, layout)
        return x_TD + self.feed_forward(self.feed_forward_norm(x_TD))


class Transformer(nn.Module):
    """Embedding, blocks, norm and output projection over one packed sequence of documents.

    A micro-batch of several samples is a longer packed sequence: the document boundaries in `layout` keep them apart.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.rope = config, config.rope
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.output = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.whole: Callable[[Tensor], Tensor] | None = None

    def set_attention(self, kinds: Iterable[LocalAttention]) -> None:
        """Choose the attention of every block, first to last; may change between steps."""
        for attention, kind in zip(self._attentions(), kinds, strict=True):
            attention.kind = kind

    def set_engines(self, engines: Iterable[Engine]) -> None:
        """Choose what runs the attention of every block, first to last."""
        for attention, engine in zip(self._attentions(), engines, strict=True):
            attention.engine = engine

    def _attentions(self) -> Iterator[Attention]:
        return (module for module in self.modules() if isinstance(module, Attention))

    def set_whole(self, whole: Callable[[Tensor], Tensor]) -> None:
        """Choose what makes the output projection's whole weight of the part that is here."""
        self.whole = whole

    def set_rope(self, rope: RopeConfig) -> None:
        """Choose the rotary embedding of all blocks; may change between steps."""
        self.rope = rope

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, layout: Layout) -> Tensor:
        """Normalised residual stream after the last block, [T, D]."""
        cos, sin = rope_cos_sin(positions_T, self.rope, self.config.head_width)
        x_TD = self.embedding(tokens_T)
        for block in self.blocks:
            x_TD = block(x_TD, cos, sin, layout)
        return self.norm(x_TD)

    @property
    def output_weight(self) -> Tensor:
        """Weight of the output projection, [V, D]; the embedding's own when tied."""
        weight_VD = self.embedding.weight if self.output is None else self.output.weight
        return weight_VD if self.whole is None else self.whole(weight_VD)

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        layout: Layout,
        loss_on: tuple[Tensor, Tensor, Tensor] | None = None,
        rows_n: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """The loss sum, or token losses, or logits.

        tokens, positions int64 [T]. With `loss_on` = (labels int64 [n], index int64 [n], weights float32 [n]): the sum
        of the weighted losses of the rows in `index`, a float32 scalar; `per_token`, for evaluation: those losses
        themselves, float32 [n], not weighted. Without: logits [n, V] of the rows `rows_n` (all rows when None), in the
        compute dtype.
        """
        hidden_TD = self.hidden(tokens_T, positions_T, layout)
        if loss_on is not None and per_token:
            labels_n, index_n, _ = loss_on
            return token_losses(hidden_TD, self.output_weight, labels_n, index_n)
        if loss_on is not None:
            return weighted_loss_sum(hidden_TD, self.output_weight, *loss_on)
        return F.linear(hidden_TD if rows_n is None else hidden_TD[rows_n], self.output_weight)
