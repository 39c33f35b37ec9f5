"""A block of the model: attention and feed-forward, with the norms, gates and sinks that its layer has.

Shape suffixes: T packed tokens, D hidden size, H query heads, K key/value heads, d head width. In engines L are the
rows of this rank and D is the head width.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.kind import AttentionKind, LayerInput, SublayerInput, TwoSublayers
from moba_train.attention.layout import Layout
from moba_train.config.model import LayerRope, ModelConfig
from moba_train.model.feed_forward import RegisteredFeedForward, build_feed_forward
from moba_train.model.rope import apply_rope, rope_cos_sin


class NotingEngine(Engine):
    """Another engine, which also raises `largest_H`, one number for each head, to the largest of each call's `lse`."""

    def __init__(self, engine: Engine, largest_H: Tensor) -> None:
        self._engine = engine
        self._largest_H = largest_H
        self.observers = engine.observers

    def __call__(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Results of the other engine."""
        out_LHD, lse_HL = self._engine(*given)
        self._largest_H.copy_(torch.maximum(self._largest_H, lse_HL.detach().amax(1)))
        return out_LHD, lse_HL

    def shard(self, layout: Layout) -> Any:
        """As of the other engine, whose calls are not noted."""
        return self._engine.shard(layout)


class CenteredRMSNorm(nn.RMSNorm):
    """RMSNorm whose weight is added to 1, computed in float32 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), self.normalized_shape, 1 + self.weight.to(dtype), self.eps).to(x.dtype)


def norm_of(config: ModelConfig, width: int) -> nn.RMSNorm:
    """A norm of the model over vectors of this width."""
    return (CenteredRMSNorm if config.centered_norms else nn.RMSNorm)(width, config.norm_eps)


class Block(nn.Module):
    """Attention and feed-forward, each normalised and added to the residual stream; a kind may have a sublayer
    between."""

    def __init__(self, config: ModelConfig, layer: int, kind_parameters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.layer = layer

        def norm(where: str) -> nn.Module:
            return norm_of(config, config.hidden_size) if config.norms in (where, "both") else nn.Identity()

        self.attention_norm = norm("pre")
        self.attention = Attention(config, layer, kind_parameters)
        self.attention_post_norm = norm("post")
        self.feed_forward_norm = norm("pre")
        self.feed_forward = build_feed_forward(config, layer)
        self.feed_forward_post_norm = norm("post")
        self.residual_scale = config.residual_scale
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
        x_TD = self._sum(x_TD, self.attention_post_norm(update_TD))
        if isinstance(kind, TwoSublayers):
            x_TD = x_TD + self.attention.second_sublayer(x_TD, cos, sin, layout)
        if isinstance(self.feed_forward, RegisteredFeedForward):
            update_TD, own_T = self.feed_forward(self.feed_forward_norm(x_TD))
            found = [loss_T for loss_T in (auxiliary_T, own_T) if loss_T is not None]
            return self._sum(x_TD, self.feed_forward_post_norm(update_TD)), sum(found[1:], found[0]) if found else None
        rows = self.feed_forward_rows or len(x_TD)
        if len(x_TD) <= rows:
            return self._with_feed_forward(x_TD), auxiliary_T
        # Parts of the rows, so that the widest tensors exist for a part alone (parallel/activations.py).
        return torch.cat([self._with_feed_forward(part) for part in x_TD.split(rows)]), auxiliary_T

    def _with_feed_forward(self, x_TD: Tensor) -> Tensor:
        return self._sum(x_TD, self.feed_forward_post_norm(self.feed_forward(self.feed_forward_norm(x_TD))))

    def _sum(self, x_TD: Tensor, update_TD: Tensor) -> Tensor:
        return x_TD + (update_TD if self.residual_scale == 1 else self.residual_scale * update_TD)


class Attention(nn.Module):
    """Grouped-query projections around an attention kind; the kind and the engine that runs it are set from outside."""

    def __init__(self, config: ModelConfig, layer: int, kind_parameters: Mapping[str, nn.Module]) -> None:
        super().__init__()
        width = config.head_width
        bias = config.qkv_bias
        self.head_dim = width
        self._q_scale = 1.0 if config.attention_scale is None else config.attention_scale * width**0.5
        """Factor on queries: kernels multiply scores by head_dim ** -0.5."""
        for name, module in kind_parameters.items():
            self.add_module(name, module)
        self.kind: AttentionKind | None = None
        self.engine: Engine = LOCAL_ENGINE
        self.largest_lse_H: Tensor | None = None
        """Raised by training forward passes to the largest log-sum-exp of each head here; None: not noted."""
        self.rope: LayerRope = config.rope
        self._is_bare = config.is_bare(layer)
        if self._is_bare:
            return
        self.q_proj = nn.Linear(config.hidden_size, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden_size, bias=config.o_bias)
        self._norms_all_heads = config.qk_norm == "all_heads"
        together = (config.heads, config.kv_heads) if self._norms_all_heads else (1, 1)
        norms = [norm_of(config, heads * width) if config.qk_norm else nn.Identity() for heads in together]
        self.q_norm, self.k_norm = norms
        if gates := config.gates(layer):
            self.output_gate = nn.Linear(config.hidden_size, gates, bias=False)
        if config.has_sink(layer):
            self.sink = Sink(config.heads)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> tuple[Tensor, Tensor | None]:
        """The layer's output [T, D] and, for kinds that have one, the auxiliary loss of each token, float32 [T]."""
        assert self.kind is not None
        if self._is_bare:
            q_THd = k_TKd = v_TKd = x_TD.new_empty(len(x_TD), 0, self.head_dim)
        else:
            q_THd = self._normalised(self.q_norm, self.q_proj(x_TD))
            k_TKd = self._normalised(self.k_norm, self.k_proj(x_TD))
            v_TKd = self.v_proj(x_TD).unflatten(-1, (-1, self.head_dim))
        if self._q_scale != 1:
            q_THd = self._q_scale * q_THd
        rotate = partial(apply_rope, cos=cos, sin=sin)
        modules = self._modules
        sink = (self.sink(),) if "sink" in modules else ()
        engine = self.engine
        if self.largest_lse_H is not None and torch.is_grad_enabled():
            engine = NotingEngine(engine, self.largest_lse_H)
        layer = LayerInput(x_TD, q_THd, k_TKd, v_TKd, rotate, layout, engine, self._rotate_at, sink)
        out_THd, auxiliary_T = self.kind.mix(layer, modules.get(self.kind.name))
        if "output_gate" in modules:
            gates_THg = self.output_gate(x_TD).unflatten(-1, (out_THd.shape[1], -1))
            out_THd = out_THd * gates_THg.sigmoid()
        return out_THd.flatten(1) if self._is_bare else self.o_proj(out_THd.flatten(1)), auxiliary_T

    def _normalised(self, norm: nn.Module, x_TD: Tensor) -> Tensor:
        if self._norms_all_heads:
            return norm(x_TD).unflatten(-1, (-1, self.head_dim))
        return norm(x_TD.unflatten(-1, (-1, self.head_dim)))

    def second_sublayer(self, x_TD: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """The update [T, D] of the residual stream by the second sublayer of a kind that has one."""
        assert isinstance(self.kind, TwoSublayers)
        layer = SublayerInput(x_TD, partial(apply_rope, cos=cos, sin=sin), layout, self.engine)
        return self.kind.second_sublayer(layer, self._modules.get(self.kind.name))

    def _rotate_at(self, x_nHd: Tensor, positions_n: Tensor) -> Tensor:
        return apply_rope(x_nHd, *rope_cos_sin(positions_n, self.rope, x_nHd.shape[-1]))


class Sink(nn.Module):
    """A logit of each head that joins its softmax without a value: heads may attend to nothing (OpenAI 2025,
    arXiv:2508.10925, section 2)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Tensor:
        """The logits [H]."""
        return self.weight
