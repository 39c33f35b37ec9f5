"""The kind `lightning`: lightning attention, linear attention with a constant decay for each head.

Qin et al. 2024 (arXiv:2401.04658); MiniMax-01 (arXiv:2501.08313, section 2.2) has it in seven of eight layers:

    S_t = lambda_h S_{t-1} + silu(k_t)^T v_t,   out_t = RMSNorm(silu(q_t) S_t) * sigmoid(x_t W)

Shape suffixes: T rows of the layer, n tokens among them, D hidden size, H query heads, K key/value heads, d head width.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kind import (
    AttentionKind,
    LayerInput,
    MicroBatch,
    StageContext,
    TokenBytes,
    parameter_count,
)
from moba_train.attention.layout import Layout
from moba_train.attention.observer import statistics_observer
from moba_train.attention.shard import own_rows, padded
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.linear.decayed import decayed_attention
from moba_train.mechanisms.linear.fla import PACKAGE, fla_decayed_attention, fla_problem, fla_refuses, has_fla
from moba_train.mechanisms.linear.states import STATES, segments, state_statistics, states_behind, with_earlier_states

Decay = Literal["linear", "geometric"]
_DECAYS: tuple[Decay, ...] = get_args(Decay)


def log_decays(decay: Decay, heads: int, layer: int, layers: int) -> Tensor:
    """log lambda of each head, float64 [H]; heads count from h = 1, layers from 0.

    `linear`: -8 h / H (1 - layer / layers), as Qin et al. write it. `geometric`: -2^(-8 h / H), the slopes of ALiBi,
    times 1 - layer / (layers - 1) + 1e-5, as MiniMax-Text-01's published code has it.
    """
    # On the CPU even where modules are made on the device `meta`, which has no values.
    fractions_H = torch.arange(1, heads + 1, dtype=torch.float64, device="cpu") / heads
    if decay == "linear":
        return -8 * fractions_H * (1 - layer / layers)
    return -torch.exp2(-8 * fractions_H) * (1 - layer / max(layers - 1, 1) + 1e-5)


class LightningParameters(nn.Module):
    """A layer's output gate and output norm, and its decays, which depend on the layer's place in the model."""

    log_decays: Tensor
    """float64 [2, H]: log lambda for each `Decay`, as stages may differ in it. Neither trained nor saved."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        width = model.heads * model.head_width
        self.gate = nn.Linear(model.hidden_size, width, bias=False)
        self.norm = nn.RMSNorm(width, model.norm_eps)
        self._place = (model.heads, layer, model.layers)
        self.register_buffer("log_decays", self._made_decays().to(self.norm.weight.device), persistent=False)

    def forward(self, out_nHd: Tensor, x_nD: Tensor) -> Tensor:
        """The layer's output, normed over all heads together and gated."""
        return (self.norm(out_nHd.flatten(1)) * self.gate(x_nD).sigmoid()).view_as(out_nHd)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LightningParameters":
        # `to_empty` would leave the decays undefined, and `bfloat16()` would round them.
        super()._apply(fn, recurse)
        self.log_decays = self._made_decays().to(self.log_decays.device)
        return self

    def _made_decays(self) -> Tensor:
        return torch.stack([log_decays(decay, *self._place) for decay in _DECAYS])


class LightningKind(AttentionKind):
    """Each head sums over all earlier tokens of the document, with weights that shrink by a constant factor a token."""

    name = "lightning"
    statistics = STATES

    class Options(Section):
        """Options of `kind: lightning`."""

        decay: Decay = Field(
            "linear",
            description="decay of head h of H in layer l of L: linear: -8h/H (1 - l/L), the paper's; geometric: "
            "-2^(-8h/H) (1 - l/(L-1) + 1e-5), MiniMax-01's code, whose heads remember 1 to 256 tokens and more",
        )
        backend: Literal["auto", "fla", "torch"] = Field(
            "auto",
            description="fla: kernels of the package fla-core, CUDA; torch: plain PyTorch; auto: fla if it can run "
            "and the run need not be deterministic",
        )

    options: Options

    @classmethod
    def problems(cls, options: Options, context: StageContext) -> Iterator[str]:
        """A backend that cannot run."""
        reason = fla_problem(context.device, context.deterministic)
        if options.backend == "fla" and reason:
            yield f"backend: given 'fla' {context.layers}, which cannot run: {reason}; set auto or torch"

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        """The gate [H d, D], the norm [H d], and the decays as a buffer."""
        return LightningParameters(model, layer)

    def mix(self, layer: LayerInput, parameters: LightningParameters) -> tuple[Tensor, Tensor | None]:
        """Linear attention without rotary embedding, whose output is normed and gated."""
        shard = layer.engine.shard(layer.layout)
        q_nHd, k_nKd, v_nKd = (own_rows(x, shard) for x in (layer.q_THd, layer.k_TKd, layer.v_TKd))
        log_decay_H = parameters.log_decays[_DECAYS.index(self.options.decay)]
        out_nHd = self._attend(q_nHd, k_nKd, v_nKd, log_decay_H, shard.layout)
        out_nHd = with_earlier_states(out_nHd, q_nHd, k_nKd, v_nKd, log_decay_H, shard)
        if observer := statistics_observer(layer.engine):
            states_rHdd = states_behind(k_nKd, v_nKd, log_decay_H, shard)
            observer.report(state_statistics(states_rHdd, log_decay_H, out_nHd))
        # Recomputed in the backward pass, which would keep two more tensors of the output's size.
        gated_nHd = checkpoint(
            parameters, out_nHd, own_rows(layer.x_TD, shard), use_reentrant=False, preserve_rng_state=False
        )
        return padded(gated_nHd, len(layer.x_TD)), None

    def _attend(self, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor, log_decay_H: Tensor, layout: Layout) -> Tensor:
        """Linear attention of silu(q), silu(k) and v inside the layout's segments, by the backend that the options and
        the tensors allow."""
        if len(q_nHd) and self._uses_fla(q_nHd):
            return fla_decayed_attention(q_nHd, k_nKd, v_nKd, log_decay_H, layout)
        return decayed_attention(q_nHd, k_nKd, v_nKd, log_decay_H, segments(layout))

    def _uses_fla(self, x: Tensor) -> bool:
        """Raises ValueError when the options demand fla's kernels and these cannot run."""
        refused = fla_refuses(x)
        if self.options.backend == "fla" and refused:
            raise ValueError(f"attention.lightning.backend: 'fla' cannot run: {refused}; set auto or torch")
        if self.options.backend != "auto":
            return self.options.backend == "fla"
        if x.is_cuda and not has_fla():
            warnings.warn(  # shown once per place, Python's default
                f"attention.lightning runs in plain PyTorch: the package {PACKAGE}, which is faster, is not installed",
                stacklevel=2,
            )
        return not refused and not torch.are_deterministic_algorithms_enabled()

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of full attention: the sum is over all earlier tokens, though their weights shrink."""
        return full_pairs(lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The recurrence, which no chunked form can do with less: for each token and head 2 d^2 to add to the state and
        2 d^2 to read it, three passes' worth; and the gate's matrix."""
        weights = parameter_count(self, model, least_dimensions=2)
        return (12.0 * model.heads * model.head_width**2 + 6.0 * weights) * sum(lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """The result of the linear attention, before norm and gate. No more than a few states are gathered."""
        return TokenBytes(activations=batch.width * model.heads * model.head_width, gathered=0)
