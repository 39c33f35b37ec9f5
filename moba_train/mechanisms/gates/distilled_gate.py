"""Base of the kinds with a distilled gate: warm-up under full attention, then attention to the blocks that the gate
selects.

A gate gives each query the blocks that it should attend to. Selecting has no gradient, so the gate learns by
distillation: the KL divergence pulls its softmax over blocks to attention's probability in the blocks. The gate's
inputs are detached: the divergence trains the gate alone, and the loss of the language model never reaches it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.block_sparse import BlockOptions, GivenBlocks, refused_triton, too_long
from moba_train.attention.full import FullAttention
from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kernels.common.selection import SELECTION
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import (
    AttentionKind,
    KindFacts,
    LayerInput,
    MicroBatch,
    StageContext,
    TokenBytes,
)
from moba_train.attention.moba.moba_kind import attended_pairs
from moba_train.attention.observer import AttentionCall, statistics_observer
from moba_train.attention.shard import Shard, attends_to_all, own_rows, padded
from moba_train.attention.statistics import SOFTMAX
from moba_train.config.base import Length
from moba_train.config.model import ModelConfig

Features = tuple[Tensor, Tensor]
"""Features of queries and features of keys, which the gate compares; differentiable in the gate's parameters."""


class GateOptions(BlockOptions):
    """Options that kinds with a distilled gate share."""

    mode: Literal["warmup", "sparse"] = Field(
        "sparse",
        description="warmup: full attention, from which the gate learns; sparse: attention to the blocks that the gate "
        "selects",
    )
    block_size: Length = Field(64, description="tokens per block; blocks start again with each document")
    topk: int = Field(32, ge=1, description="blocks each query attends to, its own included; 1: own block only")
    train_gate: bool = Field(
        False, description="mode sparse: whether the gate keeps learning; mode warmup: it always learns"
    )
    kl_weight: float = Field(
        1.0, gt=0, description="factor on the gate's KL divergence, the auxiliary loss, which trains the gate alone"
    )
    kl_every: int = Field(
        1,
        ge=1,
        description="the divergence of one of each N queries of a document, counted N times, so that its mean is about "
        "that of all; seer: of one of each N blocks of queries; 1: of all",
    )

    @property
    def forced(self) -> tuple[int, int]:
        """First blocks of a document, and last ones up to a query's own, that the query attends to in any case."""
        return 0, 1


class Teacher(NamedTuple):
    """Attention that a gate learns from, of rotated queries and keys, without gradients."""

    q_nHd: Tensor
    k_TKd: Tensor
    lse_Hn: Tensor
    selected_HnC: Tensor | None
    """The history blocks that it went to; None: all."""


class DistilledGate(AttentionKind):
    """Base class: a kind gives its options, its parameters, its gate's features, their choice and their divergence."""

    Options = GateOptions
    options: GateOptions
    statistics = SOFTMAX | SELECTION

    def __init__(self, options: GateOptions, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.full = FullAttention(FullAttention.Options(), head_dim)
        key = f"attention.{self.name}.backend"
        first, local = options.forced
        sizes = options.block_size, options.history_blocks, head_dim
        attention = self.attends_by(options, head_dim)
        self.blocks = attention(*sizes, options.backend, key, first=first, local=local)
        learns = options.mode == "warmup" or options.train_gate
        self.facts = KindFacts(learns=learns, own_kernels=attention is not GivenBlocks)
        self.attentions = (self.full,) if self.needs_full else ()

    @property
    def needs_full(self) -> bool:
        """True if the layer computes full attention."""
        return self.options.mode == "warmup"

    @classmethod
    def attends_by(cls, options: GateOptions, head_dim: int) -> type[GivenBlocks]:
        """Class of the attention to selected blocks."""
        return GivenBlocks

    @classmethod
    def triton_problem(cls, options: GateOptions, context: StageContext) -> str:
        """The reason why the kernels of this attention cannot run in a stage; empty if they can."""
        sizes = context.model.head_width, options.block_size, options.history_blocks
        return triton_problem(context.device, *sizes)

    @classmethod
    def sampled_at_once(cls, options: GateOptions) -> int:
        """Neighbouring queries of which all or none count in the divergence."""
        return 1

    @classmethod
    def problems(cls, options: GateOptions, context: StageContext) -> Iterator[str]:
        """A block longer than the sequence, a divergence of no query, and a backend that cannot run."""
        yield from too_long(context, options, "block_size")
        most = 2 * -(-context.seq_len // cls.sampled_at_once(options)) - 1  # the first that counts is the middle one
        if options.kl_every > most and (options.mode == "warmup" or options.train_gate):
            yield (
                f"kl_every: given {options.kl_every} {context.layers}, with which no query of a sequence of "
                f"{context.seq_len} tokens counts; allowed: at most {most}"
            )
        if options.mode == "sparse":
            yield from refused_triton(context, options.backend, cls.triton_problem(options, context))

    @abstractmethod
    def features(self, layer: LayerInput, parameters: nn.Module) -> Features:
        """The gate's features from the layer's detached inputs. Called on all ranks together."""

    @abstractmethod
    def select(self, features: Features, shard: Shard, q_nHd: Tensor, k_TKd: Tensor) -> Tensor:
        """The history blocks of the shard's queries, int32 [H, n, C], or [K, n, C] if `self.blocks` takes them so;
        `q_nHd`, `k_TKd`: rotated."""

    @abstractmethod
    def divergence(self, features: Features, shard: Shard, teacher: Teacher) -> Tensor:
        """The gate's KL divergence for each query of the shard, float32 or float64 [n] in nats: of one of
        each `kl_every` queries, as many times, and 0 for the others.

        Called on all ranks together.
        """

    def mix(self, layer: LayerInput, parameters: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Full attention in the warm-up, else attention to the selected blocks; and the divergence while the gate
        learns."""
        rotated = layer._replace(q_THd=layer.rotate(layer.q_THd), k_TKd=layer.rotate(layer.k_TKd))
        if self.options.mode == "warmup":
            return self._warm_up(layer, rotated, parameters)
        return self._sparse(layer, rotated, parameters)

    def _warm_up(self, layer: LayerInput, rotated: LayerInput, parameters: nn.Module) -> tuple[Tensor, Tensor | None]:
        out_LHd, lse_HL = layer.engine(rotated.q_THd, rotated.k_TKd, rotated.v_TKd, self.full, layer.layout)
        shard = layer.engine.shard(layer.layout)
        observer = statistics_observer(layer.engine)
        learns = torch.is_grad_enabled()
        if not (learns or observer):
            return out_LHd, None
        # Detached: the divergence trains the gate alone.
        q_nHd = own_rows(rotated.q_THd, shard).detach()
        k_TKd = shard.gather("k", own_rows(rotated.k_TKd, shard).detach())
        features = self.features(layer, parameters)
        if observer:  # sees what the gate would select
            v_TKd = shard.gather("v", own_rows(rotated.v_TKd, shard).detach())
            selected_HnC = self.select(features, shard, q_nHd, k_TKd)
            observer.selected(self.blocks, (selected_HnC,), shard.layout)
            call = AttentionCall(q_nHd, k_TKd, v_TKd, self.blocks, shard.layout, selected_HnC, has_all_keys=True)
            observer.attended(call, out_LHd, lse_HL)
        if not learns:
            return out_LHd, None
        lse_Hn = lse_HL[:, : len(q_nHd)]
        kl_n = self.divergence(features, shard, Teacher(q_nHd, k_TKd, lse_Hn, None))
        return out_LHd, padded(kl_n * self.options.kl_weight, len(layer.x_TD))

    def _sparse(self, layer: LayerInput, rotated: LayerInput, parameters: nn.Module) -> tuple[Tensor, Tensor | None]:
        shard = layer.engine.shard(layer.layout)
        q_nHd = own_rows(rotated.q_THd, shard)
        k_TKd = shard.gather("k", own_rows(rotated.k_TKd, shard))
        v_TKd = shard.gather("v", own_rows(rotated.v_TKd, shard))
        if attends_to_all(shard):
            return padded(shard.attend(q_nHd, k_TKd, v_TKd, self.full)[0], len(layer.x_TD)), None
        features = self.features(layer, parameters)
        selected_HnC = self.select(features, shard, q_nHd, k_TKd)
        out_nHd, lse_Hn = shard.attend(q_nHd, k_TKd, v_TKd, self.blocks, selected_HnC)
        if not (self.facts.learns and torch.is_grad_enabled()):
            return padded(out_nHd, len(layer.x_TD)), None
        teacher = Teacher(q_nHd.detach(), k_TKd.detach(), lse_Hn, selected_HnC)
        if self.needs_full:
            with torch.no_grad():
                # Of the teacher only the LSE counts: with it q and k give each probability again, block by block.
                _, lse_HL = layer.engine(rotated.q_THd, rotated.k_TKd, rotated.v_TKd, self.full, layer.layout)
            teacher = teacher._replace(lse_Hn=lse_HL[:, : len(q_nHd)], selected_HnC=None)
        kl_n = self.divergence(features, shard, teacher)
        return padded(out_nHd, len(layer.x_TD)), padded(kl_n * self.options.kl_weight, len(layer.x_TD))

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of full attention in the warm-up; else own blocks up to the query, and at most topk - 1 complete blocks
        before."""
        options = self.options
        if options.mode == "warmup":
            return full_pairs(lengths)
        return sum(attended_pairs(length, options.block_size, options.topk) for length in lengths)

    def flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Attention, the gate, and while it learns what it learns from."""
        width = model.heads * model.head_width
        flops = 12.0 * width * self.pairs(model, lengths)
        if self.needs_full and self.options.mode == "sparse":
            flops += 4.0 * width * full_pairs(lengths)
        return flops + self.gate_flops(model, lengths)

    @abstractmethod
    def gate_flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Operations of the gate and of its divergence."""

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Saved in mode sparse are selected block ids and their inverse lists, int32 each, and gathered are keys and
        values; full attention in the warm-up is an engine call."""
        workspace = super().token_bytes(model, batch).workspace if self.needs_full else 0
        options = self.options
        if options.mode == "warmup":
            return TokenBytes(workspace=workspace)
        saved = 2 * 4 * model.heads * min(options.history_blocks, -(-batch.seq_len // options.block_size))
        return TokenBytes(saved, gathered=2 * batch.width * model.kv_heads * model.head_width, workspace=workspace)
