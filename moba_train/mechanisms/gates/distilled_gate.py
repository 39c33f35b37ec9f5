"""What kinds with a distilled gate share: warm-up under full attention, then attention to the blocks that the gate
selects.

A gate gives each query the blocks that it should attend to. Selecting has no gradient, so the gate learns from a
distribution of its own: its softmax over blocks is pulled to attention's probability in the blocks, by their KL
divergence. The gate's inputs are detached: the divergence trains the gate alone, and the loss of the language model
never reaches it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import AttentionKind, LayerInput, StageContext
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.shard import Shard, ShardCall
from moba_train.attention.statistics import SELECTION, SOFTMAX
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig

Features = tuple[Tensor, Tensor]
"""What the gate compares: features of queries and of keys, with the gate's gradient."""


class GateOptions(Section):
    """Options that kinds with a distilled gate share."""

    mode: Literal["warmup", "sparse"] = Field(
        "sparse",
        description="warmup: full attention, from which the gate learns; sparse: attention to the blocks that the gate "
        "selects",
    )
    block_size: Length = Field(64, description="tokens per block; blocks start anew with each document")
    topk: int = Field(32, ge=1, description="blocks each query attends to, its own included; 1: own block only")
    train_gate: bool = Field(
        False, description="mode sparse: whether the gate goes on learning; mode warmup: it always does"
    )
    kl_weight: float = Field(
        1.0, gt=0, description="factor on the gate's KL divergence, the auxiliary loss, which trains the gate alone"
    )
    backend: Literal["auto", "triton", "composed", "reference"] = Field(
        "auto",
        description="how attention to the selected blocks is computed; triton: kernels for CUDA and 16-bit dtypes; "
        "composed: varlen flash attention over gathered queries, then a merge; reference: plain PyTorch, any device, "
        "and for the gate too; auto: triton where it can run, else composed where it can run",
    )


class DistilledGate(AttentionKind):
    """Base class: a kind gives its options, its parameters, its gate's features, their choice and their divergence."""

    Options = GateOptions
    statistics = SOFTMAX | SELECTION

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        assert isinstance(options, GateOptions)
        self.gate_options = options
        self.full = FullAttention(FullAttention.Options(), head_dim)
        self.blocks = GivenBlocks(options.block_size, head_dim, options.backend, f"attention.{self.name}.backend")
        self.attentions = (self.full,) if self.needs_full else ()

    @property
    def needs_full(self) -> bool:
        """Whether the layer computes full attention."""
        return self.gate_options.mode == "warmup"

    @property
    def learns(self) -> bool:
        """Whether the gate learns."""
        return self.gate_options.mode == "warmup" or self.gate_options.train_gate

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """A block longer than the sequence, a width that cannot be rotated, and a backend that cannot run."""
        assert isinstance(options, GateOptions)
        if options.block_size > context.seq_len:
            yield (
                f"block_size: given {options.block_size} {context.layers}, which does not fit in a sequence of "
                f"{context.seq_len} tokens; allowed: at most seq_len"
            )
        reason = triton_problem(context.device, context.model.head_width, options.block_size, options.topk - 1)
        if options.mode == "sparse" and options.backend == "triton" and reason:
            yield f"backend: given 'triton' {context.layers}, which cannot run: {reason}; set auto"

    @abstractmethod
    def features(self, layer: LayerInput, parameters: nn.Module) -> Features:
        """The gate's features from the layer's detached inputs. Called on all ranks together."""

    @abstractmethod
    def select(self, features: Features, shard: Shard, q_nHd: Tensor) -> Tensor:
        """The history blocks of the shard's queries, int32 [H, n, C]; of `q_nHd`, the shape counts."""

    @abstractmethod
    def divergence(
        self,
        features: Features,
        shard: Shard,
        q_nHd: Tensor,
        k_TKd: Tensor,
        lse_Hn: Tensor,
        selected_HnC: Tensor | None,
    ) -> Tensor:
        """The gate's KL divergence for each query of the shard, float32 or float64 [n] in nats.

        From rotated q and k without gradient. `selected_HnC`: what the attention with this `lse` went to; None: to
        everything. Called on all ranks together.
        """

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """Full attention in the warm-up, else attention to the selected blocks; and the divergence while the gate
        learns."""
        assert parameters is not None
        rotated = layer._replace(q_THd=layer.rotate(layer.q_THd), k_TKd=layer.rotate(layer.k_TKd))
        if self.gate_options.mode == "warmup":
            return self._warm_up(layer, rotated, parameters)
        return self._sparse(layer, rotated, parameters)

    def _warm_up(self, layer: LayerInput, rotated: LayerInput, parameters: nn.Module) -> tuple[Tensor, Tensor | None]:
        out_LHd, lse_HL = layer.engine(rotated.q_THd, rotated.k_TKd, rotated.v_TKd, self.full, layer.layout)
        shard = layer.shard
        learns = torch.is_grad_enabled()
        if not (learns or shard.observer):
            return out_LHd, None
        q_nHd = shard.own(rotated.q_THd).detach()
        k_TKd = shard.gather("k", shard.own(rotated.k_TKd).detach())
        features = self.features(layer, parameters)
        if shard.observer:
            v_TKd = shard.gather("v", shard.own(rotated.v_TKd).detach())
            selected_HnC = self.select(features, shard, q_nHd)
            shard.observer.could_select(ShardCall(q_nHd, k_TKd, v_TKd, self.blocks, selected_HnC, shard.layout))
        if not learns:
            return out_LHd, None
        lse_Hn = lse_HL[:, : len(q_nHd)]
        return out_LHd, self._loss(self.divergence(features, shard, q_nHd, k_TKd, lse_Hn, None), shard)

    def _sparse(self, layer: LayerInput, rotated: LayerInput, parameters: nn.Module) -> tuple[Tensor, Tensor | None]:
        shard = layer.shard
        q_nHd = shard.own(rotated.q_THd)
        k_TKd = shard.gather("k", shard.own(rotated.k_TKd))
        v_TKd = shard.gather("v", shard.own(rotated.v_TKd))
        if shard.attends_to_all:
            return shard.padded(shard.attend(q_nHd, k_TKd, v_TKd, self.full)[0]), None
        features = self.features(layer, parameters)
        selected_HnC = self.select(features, shard, q_nHd)
        out_nHd, lse_Hn = shard.attend(q_nHd, k_TKd, v_TKd, self.blocks, selected_HnC)
        if not (self.learns and torch.is_grad_enabled()):
            return shard.padded(out_nHd), None
        teacher: tuple[Tensor, Tensor | None] = (lse_Hn, selected_HnC)
        if self.needs_full:
            with torch.no_grad():
                _, lse_HL = layer.engine(rotated.q_THd, rotated.k_TKd, rotated.v_TKd, self.full, layer.layout)
            teacher = (lse_HL[:, : len(q_nHd)], None)
        kl_n = self.divergence(features, shard, q_nHd.detach(), k_TKd.detach(), *teacher)
        return shard.padded(out_nHd), self._loss(kl_n, shard)

    def _loss(self, kl_n: Tensor, shard: Shard) -> Tensor:
        return shard.padded(kl_n * self.gate_options.kl_weight)

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """Half of each document's square in the warm-up; else own blocks up to the query, and at most topk - 1 complete
        blocks before."""
        options = self.gate_options
        if options.mode == "warmup":
            return _full_pairs(lengths)
        return sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention, the gate, and while it learns what it learns from."""
        full = _full_pairs(lengths)
        flops = 12.0 * model.heads * model.head_width * self.attended_pairs(lengths)
        if self.needs_full and self.gate_options.mode == "sparse":
            flops += 4.0 * model.heads * model.head_width * full
        return flops + self.gate_flops(model, lengths, full)

    @abstractmethod
    def gate_flops(self, model: ModelConfig, lengths: Sequence[int], full_pairs: float) -> float:
        """Operations of the gate and of its divergence; `full_pairs`: those of full attention."""

    def saved_bytes(self, model: ModelConfig, seq_len: int) -> int:
        """Selected block ids and their inverse lists, int32 each, in mode sparse."""
        options = self.gate_options
        if options.mode == "warmup":
            return 0
        return 2 * 4 * model.heads * min(options.topk - 1, -(-seq_len // options.block_size))

    def gathered_bytes(self, model: ModelConfig, width: int) -> int | None:
        """Keys and values in mode sparse; full attention in the warm-up is an engine call."""
        return None if self.gate_options.mode == "warmup" else 2 * width * model.kv_heads * model.head_width


def _full_pairs(lengths: Sequence[int]) -> float:
    return sum(length**2 for length in lengths) / 2
