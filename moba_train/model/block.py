"""A block of the model: attention and feed-forward.

Shape suffixes: T packed tokens, D hidden size, H query heads, K key/value heads, d head width.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.kind import AttentionKind, LayerInput, SublayerInput, TwoSublayers
from moba_train.attention.layout import Layout
from moba_train.config.model import ModelConfig
from moba_train.model.feed_forward import RegisteredFeedForward, build_feed_forward
from moba_train.model.rope import apply_rope, rope_cos_sin


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; a kind may have a sublayer between."""

    def __init__(self, config: ModelConfig, layer: int, kind_parameters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, kind_parameters)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = build_feed_forward(config, layer)
        self.feed_forward_rows: int | None = None
        """Rows that the feed-forward takes at once; None: all."""

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        # Read before anything is computed: torch.compile then never takes what it made for one kind for a layer of
        # another one. Where a kind cannot be traced as a whole, that would begin with code that asks for no kind, and a
        # block that is recomputed would be another one than the first time.
        kind = self.attention.kind
        if kind is None or not kind.name:
            raise RuntimeError("no attention kind set: call Transformer.set_attention first")
        update_TD, auxiliary_T = self.attention(self.attention_norm(x_TD), cos, sin, layout)
        x_TD = x_TD + update_TD
        if isinstance(kind, TwoSublayers):
            x_TD = x_TD + self.attention.second_sublayer(x_TD, cos, sin, layout)
        if isinstance(self.feed_forward, RegisteredFeedForward):
            update_TD, own_T = self.feed_forward(self.feed_forward_norm(x_TD))
            found = [loss_T for loss_T in (auxiliary_T, own_T) if loss_T is not None]
            return x_TD + update_TD, sum(found[1:], start=found[0]) if found else None
        rows = self.feed_forward_rows or len(x_TD)
        if len(x_TD) <= rows:
            return self._with_feed_forward(x_TD), auxiliary_T
        # Parts of the rows, so that the widest tensors exist for a part alone (parallel/activations.py).
        return torch.cat([self._with_feed_forward(part) for part in x_TD.split(rows)]), auxiliary_T

    def _with_feed_forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.feed_forward(self.feed_forward_norm(x_TD))


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

    def second_sublayer(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """The update [T, D] of the residual stream by the second sublayer of a kind that has one."""
        assert isinstance(self.kind, TwoSublayers)
        layer = SublayerInput(x_TD, partial(apply_rope, cos=cos, sin=sin), layout, self.engine)
        return self.kind.second_sublayer(layer, self._modules.get(self.kind.name))

    def _rotate_at(self, x_nHd: Tensor, positions_n: Tensor) -> Tensor:
        return apply_rope(x_nHd, *rope_cos_sin(positions_n, self.rope, x_nHd.shape[-1]))
