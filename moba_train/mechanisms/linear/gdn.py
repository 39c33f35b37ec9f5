"""The kind `gdn`: Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464), the linear layers of Qwen3-Next.

    q, k = l2(silu(conv(.))), v = silu(conv(.)),  alpha_t = exp(-exp(A) softplus(W_alpha x_t + b)),
    beta_t = sigmoid(W_beta x_t),  out_t = RMSNorm(S_t^T q_t / sqrt(d)) * silu(W_gate x_t)

with S_t by the delta rule (delta.py). It is `kda` whose channels of a head all decay alike, so that it runs wherever
`kda` does: on a GPU by fla-core's kernels of that, which read a decay for each channel.

Its heads are the layer's, or, as in Qwen3-Next, its own, with projections of its own: then several heads of values
share a head of queries and keys.

Shape suffixes: T rows, n rows without padding, D hidden size, H query heads, K key/value heads, d head width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from moba_train.attention.kind import LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.config.base import Section
from moba_train.config.mesh import allowed_divisors
from moba_train.config.model import LARGEST_WIDTH, MOST_HEADS, ModelConfig
from moba_train.mechanisms.linear.convolution import ShortConvolution
from moba_train.mechanisms.linear.delta import DeltaInputs
from moba_train.mechanisms.linear.heads import heads_of_rank, sum_over_heads
from moba_train.mechanisms.linear.kda import DeltaParameters, KdaKind


class GdnParameters(DeltaParameters):
    """A layer's convolutions, decays, step sizes, output gate and output norm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.decay = nn.Linear(model.hidden_size, model.heads, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(model.heads))
        self.gate = nn.Linear(model.hidden_size, model.heads * model.head_width, bias=False)

    def delta_inputs(self, x_nD: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> DeltaInputs:
        """Inputs of the delta rule: each head's decay for each of its channels."""
        decay_nHd = self.decay(x_nD).unsqueeze(-1).expand_as(q_nHd).contiguous()
        bias_h = self.dt_bias.repeat_interleave(q_nHd.shape[-1])
        return DeltaInputs(q_nHd, k_nKd, v_nKd, decay_nHd, self.beta(x_nD), self.A_log, bias_h)

    def gated(self, out_nHd: Tensor, x_nD: Tensor) -> Tensor:
        """The layer's output, normed for each head and gated."""
        return self.norm(out_nHd) * F.silu(self.gate(x_nD)).view_as(out_nHd)


class GdnHeads(Section):
    """Heads of the kind's own."""

    keys: int = Field(ge=1, le=MOST_HEADS, description="heads of queries and of keys")
    values: int = Field(ge=1, le=MOST_HEADS, description="heads of values; a multiple of `keys`")
    width: int = Field(ge=1, le=LARGEST_WIDTH, description="width of each head")

    @model_validator(mode="after")
    def _is_multiple(self) -> Self:
        if self.values % self.keys:
            raise ValueError(f"values: given {self.values}; allowed: multiples of keys, {self.keys}")
        return self

    def shape(self, model: ModelConfig) -> ModelConfig:
        """The model, as if its heads were those of values."""
        return model.model_copy(update={"heads": self.values, "kv_heads": self.values, "head_dim": self.width})


class _SharedKeys(GdnParameters):
    """`GdnParameters` where several heads of values share a head of queries and keys."""

    def __init__(self, model: ModelConfig, heads: GdnHeads) -> None:
        super().__init__(heads.shape(model))
        self.q_conv = ShortConvolution(heads.keys * heads.width)
        self.k_conv = ShortConvolution(heads.keys * heads.width)
        self._shared = heads.values // heads.keys

    def delta_inputs(self, x_nD: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> DeltaInputs:
        """Inputs of the delta rule, with queries and keys for each head of values."""
        q_nHd, k_nKd = (x.repeat_interleave(self._shared, 1) for x in (q_nHd, k_nKd))
        return super().delta_inputs(x_nD, q_nHd, k_nKd, v_nKd)


class ProjectedGdn(nn.Module):
    """All weights of a layer with heads of its own."""

    tensor_style = DeltaParameters.tensor_style

    def __init__(self, model: ModelConfig, heads: GdnHeads) -> None:
        super().__init__()
        self.width = heads.width
        self.q_proj = nn.Linear(model.hidden_size, heads.keys * heads.width, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, heads.keys * heads.width, bias=False)
        self.v_proj = nn.Linear(model.hidden_size, heads.values * heads.width, bias=False)
        self.o_proj = nn.Linear(heads.values * heads.width, model.hidden_size, bias=False)
        self.delta = _SharedKeys(model, heads)

    def projected(self, layer: LayerInput) -> LayerInput:
        """The layer's input with queries, keys and values."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q_THd, k_TKd, v_TKd = (project(layer.x_TD).unflatten(-1, (-1, self.width)) for project in projections)
        return layer._replace(q_THd=q_THd, k_TKd=k_TKd, v_TKd=v_TKd)


class GdnKind(KdaKind):
    """Each head keeps a state, which forgets at one rate and replaces what a key held before."""

    name = "gdn"
    Parameters = GdnParameters

    class Options(KdaKind.Options):
        """Options of Gated DeltaNet."""

        heads: GdnHeads | None = Field(
            None, description="own heads and projections, in layers of model.bare_layers; null: the layer's"
        )

    options: Options

    @classmethod
    def projects(cls, options: Options) -> bool:
        """True with heads of its own."""
        return options.heads is not None

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """A backend that cannot run."""
        assert isinstance(options, GdnKind.Options)
        if options.heads is not None:
            if options.heads.keys % context.tp:
                given = f"heads.keys: given {options.heads.keys} {context.layers}"
                yield f"{given}, which parallel.tp {context.tp} does not divide; {allowed_divisors(options.heads.keys)}"
            context = replace(context, model=options.heads.shape(context.model))
        yield from super().problems(options, context)

    @classmethod
    def parameters(cls, options: Options, model: ModelConfig, layer: int) -> nn.Module:
        """Convolutions, decays, step sizes, output gate and output norm; with heads of its own also projections."""
        heads = options.heads
        return super().parameters(options, model, layer) if heads is None else ProjectedGdn(model, heads)

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Initial values of the published code, as those of `kda`."""
        return super().initial_values(parameter.removeprefix("delta."), shape, generator)

    def mix(self, layer: LayerInput, parameters: DeltaParameters | ProjectedGdn) -> tuple[Tensor, Tensor | None]:
        """The gated output of the heads [T, H, d], or, of heads of its own, what the layer adds, [T, D]."""
        if not isinstance(parameters, ProjectedGdn):
            return super().mix(layer, parameters)
        here, parts = heads_of_rank(layer, parameters)
        out_THd, auxiliary_T = super().mix(parts.projected(here), parts.delta)
        return sum_over_heads(parts.o_proj(out_THd.flatten(1)), layer.x_TD), auxiliary_T

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Operations of the delta rule and what is around it, of the heads that the kind has."""
        return super().flops(self._shape(model), lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Memory of the delta rule, of the heads that the kind has."""
        return super().token_bytes(self._shape(model), batch)

    def _shape(self, model: ModelConfig) -> ModelConfig:
        heads = self.options.heads
        return model if heads is None else heads.shape(model)
