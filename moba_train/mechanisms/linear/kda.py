"""The kind `kda`: Kimi Delta Attention (Kimi Linear, arXiv:2510.26692, section 3).

    q, k = l2(silu(conv(.))), v = silu(conv(.)),  alpha_t = exp(-exp(A) softplus(W_up W_down x_t + b)),
    beta_t = sigmoid(W_beta x_t),  out_t = RMSNorm(S_t^T q_t / sqrt(d)) * sigmoid(U_up U_down x_t)

with S_t by the delta rule (delta.py). Low-rank projections have rank d.

Shape suffixes: n rows, D hidden size, H query heads, K key/value heads, d head width, N segments.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call
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
from moba_train.attention.observer import statistics_observer
from moba_train.attention.shard import Shard, own_rows, padded
from moba_train.attention.statistics import Statistics
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.linear.convolution import BEFORE, TAPS, ShortConvolution, part_places
from moba_train.mechanisms.linear.delta import (
    DeltaInputs,
    Edges,
    Rows,
    delta_attention,
    delta_over_ranks,
    in_parts,
    most_rows,
)
from moba_train.mechanisms.linear.fla import fla_delta_attention, fla_problem, fla_refuses
from moba_train.mechanisms.linear.heads import DividedHeads, heads_of_rank
from moba_train.mechanisms.linear.states import STATES, segment_edges, state_statistics

T = TypeVar("T")

_WIDEST = 256
"""Head width that fla-core's kernels can do."""


class DeltaParameters(nn.Module):
    """A layer's convolutions, rates of decay, step sizes and output norm, which all kinds with the delta rule have."""

    tensor_style = DividedHeads("norm.weight", "_down.weight")

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.q_conv = ShortConvolution(model.heads * width)
        self.k_conv = ShortConvolution(model.kv_heads * width)
        self.v_conv = ShortConvolution(model.kv_heads * width)
        self.A_log = nn.Parameter(torch.empty(model.heads))
        self.beta = nn.Linear(model.hidden_size, model.heads, bias=False)
        self.norm = nn.RMSNorm(width, model.norm_eps)

    @property
    def convolutions(self) -> tuple[ShortConvolution, ShortConvolution, ShortConvolution]:
        """Convolutions of q, k and v."""
        return self.q_conv, self.k_conv, self.v_conv

    def delta_inputs(self, x_nD: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> DeltaInputs:
        """Inputs of the delta rule, from the layer's input and its convolved queries, keys and values."""
        raise NotImplementedError

    def gated(self, out_nHd: Tensor, x_nD: Tensor) -> Tensor:
        """The layer's output, normed for each head and gated."""
        raise NotImplementedError

    def forward(self, run: Callable[["DeltaParameters"], T]) -> T:
        """`run` of these parameters, or of those that `torch.func.functional_call` puts in their place."""
        return run(self)


class KdaParameters(DeltaParameters):
    """A layer's convolutions, decays, step sizes, output gate and output norm."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        hidden = model.hidden_size
        rank = model.head_width
        width = model.heads * rank
        self.decay_down = nn.Linear(hidden, rank, bias=False)
        self.decay_up = nn.Linear(rank, width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.gate_down = nn.Linear(hidden, rank, bias=False)
        self.gate_up = nn.Linear(rank, width, bias=False)

    def delta_inputs(self, x_nD: Tensor, q_nHd: Tensor, k_nKd: Tensor, v_nKd: Tensor) -> DeltaInputs:
        """Inputs of the delta rule, with a decay for each channel."""
        decay_nHd = self.decay_up(self.decay_down(x_nD)).view_as(q_nHd)
        return DeltaInputs(q_nHd, k_nKd, v_nKd, decay_nHd, self.beta(x_nD), self.A_log, self.dt_bias)

    def gated(self, out_nHd: Tensor, x_nD: Tensor) -> Tensor:
        """The layer's output, normed for each head and gated."""
        return self.norm(out_nHd) * self.gate_up(self.gate_down(x_nD)).view_as(out_nHd).sigmoid()


class KdaKind(AttentionKind):
    """Each head keeps a state, which forgets each channel at its own rate and replaces what a key held before."""

    name = "kda"
    Parameters: ClassVar[type[DeltaParameters]] = KdaParameters
    statistics = STATES | {
        "decay": "factor that a channel keeps from one token to the next",
        "step": "share of what a key holds that a token replaces",
    }

    class Options(Section):
        """Options of kinds with the delta rule, `kda` and `gdn`."""

        backend: Literal["auto", "fla", "torch"] = Field(
            "auto",
            description="fla: kernels of the package fla-core, CUDA; torch: plain PyTorch, token by token, slow on a "
            "GPU; auto: fla on CUDA, torch on a CPU",
        )

    @classmethod
    def problems(cls, options: Options, context: StageContext) -> Iterator[str]:
        """A backend that cannot run."""
        uses_fla = options.backend == "fla" or (options.backend == "auto" and context.device == "cuda")
        reason = fla_problem(context.device, context.deterministic)
        if context.model.head_width > _WIDEST:
            reason = f"head dim {context.model.head_width}, at most {_WIDEST} supported"
        if uses_fla and reason:
            yield (
                f"backend: given {options.backend!r} {context.layers}, which cannot run: {reason}; set torch, which "
                "takes one token after the other"
            )

    @classmethod
    def parameters(cls, options: Any, model: ModelConfig, layer: int) -> nn.Module:
        """Convolutions, decays, step sizes, output gate and output norm."""
        return cls.Parameters(model)

    @classmethod
    def initial_values(cls, parameter: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Initial values of the published code: A uniform in [1, 16], softplus(dt_bias) log-uniform in [0.001, 0.1],
        convolutions uniform as PyTorch's own."""
        values = torch.empty(shape, device=generator.device)
        if parameter == "A_log":
            return values.uniform_(1, 16, generator=generator).log()
        if parameter == "dt_bias":
            step = values.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
            # expm1: with steps down to 0.001, 1 - exp(-step) would lose three of seven digits.
            return step + (-torch.expm1(-step)).log()  # the inverse of softplus
        if parameter.endswith("_conv.weight"):
            return values.uniform_(-(TAPS**-0.5), TAPS**-0.5, generator=generator)
        return None

    @torch.compiler.disable  # fla's kernels break the graph; the plain recurrence would be unrolled
    def mix(self, layer: LayerInput, parameters: DeltaParameters) -> tuple[Tensor, Tensor | None]:
        """The delta rule without rotary embedding, whose output is normed for each head and gated."""
        layer, parameters = heads_of_rank(layer, parameters)
        shard = layer.engine.shard(layer.layout)
        rows = tuple(own_rows(x, shard) for x in (layer.x_TD, layer.q_THd, layer.k_TKd, layer.v_TKd))
        # The whole layer in parts, from the convolutions to the gate, where no other rank and no later call needs its
        # states: 1.43 times full attention's peak at 32K, in four parts, and 3.5 times at 8K, in one
        # (benchmarks/results/mechanisms-h200.json).
        alone = len(shard.place.ranges_by_rank) == 1 and shard.generation is None
        most = most_rows(math.prod(layer.q_THd.shape[1:]))
        if alone and len(rows[0]) > most and torch.is_grad_enabled():
            # The gradients of the parts are added in float32.
            weights = {name: _at_least_float32(weight) for name, weight in parameters.named_parameters()}
            run = partial(self._part, parameters, weights)
            gated_nHd, _ = in_parts(run, rows, segment_edges(shard.layout), most=most, lookback=BEFORE)
            return padded(gated_nHd, len(layer.x_TD)), None
        x_nD, *qkv = rows
        convolved = [conv(x, name, shard) for conv, x, name in zip(parameters.convolutions, qkv, "qkv", strict=True)]
        inputs = parameters.delta_inputs(x_nD, *convolved)
        observer = statistics_observer(layer.engine)
        out_nHd, states_NHdd = self._attend(inputs, shard, observer is not None)
        if observer and states_NHdd is not None:
            log_alpha_nHd, beta_nH = _decays_and_steps(inputs)
            observer.report(state_statistics(states_NHdd, log_alpha_nHd, out_nHd))
            if len(x_nD):
                means = {"decay": log_alpha_nHd.exp().mean().item(), "step": beta_nH.mean().item()}
                observer.report(Statistics(means, len(x_nD)))
        # Recomputed in the backward pass, which would keep two more tensors of the output's size.
        gated_nHd = checkpoint(parameters.gated, out_nHd, x_nD, use_reentrant=False, preserve_rng_state=False)
        return padded(gated_nHd, len(layer.x_TD)), None

    def _part(
        self,
        parameters: DeltaParameters,
        weights: dict[str, Tensor],
        rows: Rows,
        before: Rows | None,
        edges: Edges,
        initial_NHdd: Tensor | None,
        wants_states: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output for consecutive rows of x, q, k and v, and the states behind their segments.

        weights: those that take the place of `parameters`', by name, rounded to their dtype.
        """

        def run(parameters: DeltaParameters) -> tuple[Tensor, Tensor | None]:
            x_nD, *qkv = rows
            places = part_places(tuple(edges[1].tolist()), x_nD.device)
            earlier = [None] * 3 if before is None else before[1:]
            convolutions = zip(parameters.convolutions, qkv, earlier, strict=True)
            convolved = [conv.part(x, before_whd, places) for conv, x, before_whd in convolutions]
            inputs = parameters.delta_inputs(x_nD, *convolved)
            out_nHd, behind_NHdd = self._rule(inputs, edges, initial_NHdd, wants_states, recomputed=True)
            return parameters.gated(out_nHd, x_nD), behind_NHdd

        rounded = {name: weights[name].to(weight.dtype) for name, weight in parameters.named_parameters()}
        found: tuple[Tensor, Tensor | None] = functional_call(parameters, rounded, (run,))
        return found

    def _attend(self, inputs: DeltaInputs, shard: Shard, wants_states: bool) -> tuple[Tensor, Tensor | None]:
        """The delta rule inside each document and, if wanted, the states behind them or the rank's ranges."""
        if len(shard.place.ranges_by_rank) > 1:
            return delta_over_ranks(inputs, self._rule_in_parts, shard, wants_states)
        if not len(inputs.q_nHd):
            return inputs.q_nHd, None
        edges = segment_edges(shard.layout)
        if shard.generation is None:
            return self._rule(inputs, edges, None, wants_states)
        states = shard.generation.states
        out_nHd, behind_NHdd = self._rule(inputs, edges, states.get("state"), wants_states=True)
        assert behind_NHdd is not None
        states["state"] = behind_NHdd
        return out_nHd, behind_NHdd

    def _rule_in_parts(
        self, inputs: DeltaInputs, edges: Edges, initial_NHdd: Tensor | None, wants_states: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_rule`, for at most `most_rows` at a time where there is a backward pass."""
        most = most_rows(math.prod(inputs.q_nHd.shape[1:]))
        if len(inputs.q_nHd) <= most or not torch.is_grad_enabled():
            return self._rule(inputs, edges, initial_NHdd, wants_states)

        def part(
            rows: Rows, _before: Rows | None, edges: Edges, initial_NHdd: Tensor | None, wants_states: bool
        ) -> tuple[Tensor, Tensor | None]:
            own = DeltaInputs(*rows, *inputs.of_heads)
            return self._rule(own, edges, initial_NHdd, wants_states, recomputed=True)

        return in_parts(part, inputs.by_row, edges, initial_NHdd, wants_states, most=most)

    def _rule(
        self,
        inputs: DeltaInputs,
        edges: Edges,
        initial_NHdd: Tensor | None,
        wants_states: bool,
        recomputed: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and, if wanted, the states behind the segments, by the backend that options and tensors allow.

        recomputed: whether a checkpoint repeats this right before its backward pass.
        """
        if self._uses_fla(inputs.q_nHd):
            return fla_delta_attention(*inputs, edges, initial_NHdd, wants_states, recomputed)
        out_nHd, behind_NHdd = delta_attention(*_activated(inputs), edges[1].tolist(), initial_NHdd)
        return out_nHd, behind_NHdd if wants_states else None

    def _uses_fla(self, x: Tensor) -> bool:
        """Raises ValueError when the kernels are needed and cannot run."""
        backend = self.options.backend
        if backend == "torch" or (backend == "auto" and not x.is_cuda):
            return False
        if refused := fla_refuses(x):
            raise ValueError(
                f"attention.{self.name}.backend: {backend!r} cannot run: {refused}; set torch, which takes one "
                "token after the other"
            )
        return True

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of full attention: a state holds something of all earlier tokens."""
        return full_pairs(lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The recurrence: for each token and head 2 d^2 each to read what the key holds, to add to the state and to
        read it for the query, three passes' worth; and 6 for each weight of matrices and convolutions."""
        weights = parameter_count(self, model, least_dimensions=2)
        return (18.0 * model.heads * model.head_width**2 + 6.0 * weights) * sum(lengths)

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved with fla's kernels are the convolutions' inputs and sums, convolved queries and keys, these normed,
        keys and values repeated for each query head, decays, two products in chunks of 64 tokens, and the result before
        norm and gate. A rank that shares its sequence with no other keeps nothing if it has more rows than `most_rows`.
        No more than a few states are gathered."""
        if batch.cp == 1 and batch.tokens > most_rows(model.heads * model.head_width // batch.tp):
            return TokenBytes(gathered=0)
        elements = model.head_width * (8 * model.heads + 5 * model.kv_heads) + 2 * 64 * model.heads
        return TokenBytes(activations=batch.width * elements, gathered=0)


def _activated(inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scaled unit queries, unit keys and values for each query head, log alpha and beta: what fla's kernels compute by
    themselves."""
    k_nHd, v_nHd = (x.repeat_interleave(inputs.q_nHd.shape[1] // x.shape[1], 1) for x in (inputs.k_nKd, inputs.v_nKd))
    q_nHd, k_nHd = map(_at_least_float32, (inputs.q_nHd, k_nHd))
    return _unit(q_nHd) * q_nHd.shape[-1] ** -0.5, _unit(k_nHd), v_nHd, *_decays_and_steps(inputs)


def _decays_and_steps(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """log alpha [n, H, d] and beta [n, H]."""
    decay_nHd, beta_nH = map(_at_least_float32, (inputs.decay_nHd, inputs.beta_nH))
    rate_nHd = F.softplus(decay_nHd + _at_least_float32(inputs.dt_bias_h).view(decay_nHd.shape[1:]))
    return -_at_least_float32(inputs.A_log_H).exp()[:, None] * rate_nHd, beta_nH.sigmoid()


def _at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x_nHd: Tensor) -> Tensor:
    return x_nHd * (x_nHd.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
