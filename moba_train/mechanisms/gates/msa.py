"""The kind `msa`: MiniMax Sparse Attention, of MiniMax-M3 (arXiv:2606.13392).

An index branch scores every earlier token: one index query head for each group of query heads that share a key/value
head, and one index key head for all groups or, which finds rare tokens far better (benchmarks/measured/sparsify.md),
one for each; two projections of the layer's input, rotated at the tokens' positions. A block's score is that of its
best token. The heads of a group attend to the same blocks. The branch learns the group's own attention: the probability
in each block, averaged over the group's heads.

Shape suffixes: n queries of this rank, T tokens of the sequence, D hidden size, H query heads, K key/value heads, d
head width, w index width, C selected blocks.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kind import LayerInput, MicroBatch, TokenBytes
from moba_train.attention.layout import LayoutArguments, layout_arguments
from moba_train.attention.shard import Shard, own_rows
from moba_train.config.base import Length, Section
from moba_train.config.model import LARGEST_WIDTH, ModelConfig
from moba_train.mechanisms.gates import index_operators as operators
from moba_train.mechanisms.gates.distilled_gate import DistilledGate, Features, GateOptions, Teacher
from moba_train.mechanisms.gates.short_blocks import ShortBlocks
from moba_train.mechanisms.layout_operators import query_positions
from moba_train.model.block import norm_of


class IndexBranch(nn.Module):
    """Two projections: `heads` index queries for each group, and `key_heads` index keys; normalised if `norms`."""

    def __init__(self, model: ModelConfig, width: int, key_heads: int, norms: bool, heads: int = 1) -> None:
        super().__init__()
        self.width = width
        self.q_proj = nn.Linear(model.hidden_size, model.kv_heads * heads * width, bias=False)
        self.k_proj = nn.Linear(model.hidden_size, key_heads * width, bias=False)
        self.q_norm = norm_of(model, width) if norms else nn.Identity()
        self.k_norm = norm_of(model, width) if norms else nn.Identity()

    def forward(self, x_nD: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries [n, K * heads, w] and index keys [n, key_heads, w], not rotated."""
        q_nKw = self.q_norm(self.q_proj(x_nD).unflatten(-1, (-1, self.width)))
        return q_nKw, self.k_norm(self.k_proj(x_nD).unflatten(-1, (-1, self.width)))


class IndexOptions(GateOptions):
    """Options that kinds with an index branch share."""

    train_gate: bool = Field(
        True, description="mode sparse: whether the gate keeps learning; mode warmup: it always learns"
    )
    index_dim: int | None = Field(
        None,
        ge=2,
        le=LARGEST_WIDTH,
        multiple_of=2,
        description="width of index queries and keys; null: the head width",
    )


class MsaKind(DistilledGate):
    """The query heads of a group attend to the blocks whose best tokens an index branch scores highest."""

    name = "msa"
    options: IndexOptions
    pooled = False
    """True if a block's score is that of its mean index key, of which each group has its own."""

    class Options(IndexOptions):
        """Options of `kind: msa`."""

        block_size: Length = Field(128, description="tokens per block; blocks start again with each document")
        topk: int = Field(16, ge=1, description="blocks each query attends to, its own included; 1: own block only")
        index_keys: Literal["shared", "group"] = Field(
            "shared",
            description="shared: one index key of a token for all groups of heads, as in MiniMax-M3; group: one for "
            "each, with as much work and more memory",
        )

    @classmethod
    def parameters(cls, options: IndexOptions, model: ModelConfig, layer: int) -> nn.Module:
        width = options.index_dim or model.head_width
        return IndexBranch(model, width, cls.key_heads(options, model), cls.normalises(model))

    @classmethod
    def normalises(cls, model: ModelConfig) -> bool:
        """True if index queries and keys are normalised: as in MiniMax-M3, where the model normalises q and k."""
        return bool(model.qk_norm)

    @classmethod
    def key_heads(cls, options: Section, model: ModelConfig) -> int:
        """Index keys of a token."""
        assert isinstance(options, MsaKind.Options)
        return model.kv_heads if options.index_keys == "group" else 1

    @classmethod
    @torch.no_grad()
    def derived_values(cls, parameter: str, shape: torch.Size, model: ModelConfig, layer: nn.Module) -> Tensor | None:
        """The layer's own projections, where the index is as wide as a head: for queries their group's mean, for keys
        those of the group, or the mean of all where one key serves all groups. It then knows something at once."""
        if parameter not in ("q_proj.weight", "k_proj.weight"):
            return None
        own: Tensor = layer.get_parameter(parameter)
        groups, width = model.kv_heads, model.head_width
        each_KhwD = (own.full_tensor() if isinstance(own, DTensor) else own).unflatten(0, (groups, -1, width))
        if shape[0] == groups * width:
            return each_KhwD.mean(1).flatten(0, 1)
        return each_KhwD.mean((0, 1)) if parameter == "k_proj.weight" and shape[0] == width else None

    def features(self, layer: LayerInput, parameters: nn.Module) -> Features:
        """Index queries [n, K, w] of this rank and index keys of all tokens, side by side: [T, w] or [T, K * w]."""
        shard = layer.engine.shard(layer.layout)
        q_LKw, k_Liw = parameters(layer.x_TD.detach())
        both_Lxw = torch.cat((q_LKw, k_Liw), 1)  # to rotate takes nine launches
        if both_Lxw.shape[-1] == layer.q_THd.shape[-1]:  # the layer has the angles of this width, another twelve
            rotated_nxw = own_rows(layer.rotate(both_Lxw), shard)
        else:
            both_nxw = own_rows(both_Lxw, shard)
            positions_n = query_positions(*layout_arguments(shard.layout), len(both_nxw))
            rotated_nxw = layer.rotate_at(both_nxw, positions_n)
        q_nKw, k_niw = rotated_nxw.split((q_LKw.shape[1], k_Liw.shape[1]), 1)
        return q_nKw, shard.gather("index_k", k_niw.flatten(1))

    def select(self, features: Features, shard: Shard, q_nHd: Tensor, k_TKd: Tensor) -> Tensor:
        """The blocks with the highest scores, equal for the heads of a group."""
        selected_KnC = self.select_by_group(features, layout_arguments(shard.layout), q_nHd, k_TKd)
        if isinstance(self.blocks, ShortBlocks):
            return selected_KnC
        return selected_KnC.repeat_interleave(q_nHd.shape[1] // len(selected_KnC), 0)

    def select_by_group(self, features: Features, where: LayoutArguments, q_nHd: Tensor, k_TKd: Tensor) -> Tensor:
        """int32 [K, n, C]: the selected history blocks of each group."""
        options = self.options
        sizes = options.block_size, options.history_blocks, self.pooled, options.backend == "reference"
        return operators.select(*features, None, *where, *sizes)

    def divergence(self, features: Features, shard: Shard, teacher: Teacher) -> Tensor:
        """The mean over groups."""
        q_nHd, k_TKd, lse_Hn, selected_HnC = teacher
        selected_KnC = None
        if selected_HnC is not None:  # a view would keep the blocks of all heads
            selected_KnC = selected_HnC[:: len(selected_HnC) // k_TKd.shape[1]].contiguous()
        where = layout_arguments(shard.layout)
        options = self.options
        sizes = options.block_size, self.full.scale, self.pooled, options.backend == "reference", options.kl_every
        return operators.distill(*features, q_nHd, k_TKd, lse_Hn, selected_KnC, *where, *sizes)

    @property
    def index_heads(self) -> int:
        """Index queries of a group."""
        return 1

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Bytes of the base class, and index keys: gathered in mode sparse. In the warm-up, keys and index keys of
        other ranks are kept, from which the gate learns. While it learns it keeps index queries and keys, before norms
        as well, float32 angles of their rotation if they are not as wide as heads and, in mode sparse, the selected
        blocks of each group. Short blocks are kept by group; the backward pass lists them by block, which takes as many
        bytes twice."""
        found = super().token_bytes(model, batch)
        width = self._index_width(model)
        index = self.key_heads(self.options, model) * width
        by_group = found.saved * model.kv_heads // (2 * model.heads)
        learned = 0
        if self.facts.learns:
            queries = model.kv_heads * self.index_heads * width
            learned = batch.width * (queries + index) * (2 if self.normalises(model) else 1) + by_group
            learned += 4 * width if width != model.head_width else 0
        if found.gathered is not None:
            found = found._replace(activations=learned, gathered=found.gathered + batch.width * index)
            if not isinstance(self.blocks, ShortBlocks):
                return found
            return found._replace(saved=by_group, workspace=found.workspace + 2 * by_group)
        others = (batch.cp - 1) * batch.width * (model.kv_heads * model.head_width + index)
        return found._replace(activations=learned + others)

    def gate_flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Two projections, index scores of all earlier tokens and, while the gate learns, of q and k in the blocks that
        are attended to."""
        options = self.options
        width = self._index_width(model)
        queries = model.kv_heads * self.index_heads
        matrices = model.hidden_size * (queries + self.key_heads(self.options, model)) * width
        index = 2.0 * queries * width
        # The projections forward, and the gradient of their weights; the layer's input gets none.
        learns = self.facts.learns
        scored = self.scored(model, lengths) / (options.kl_every if options.mode == "warmup" else 1)
        flops = 2.0 * matrices * sum(lengths) * (2 if learns else 1) + index * scored
        if learns:
            attended = self.pairs(model, lengths) / options.kl_every
            # Probabilities of the heads; gradients of the index pass one token of a block.
            flops += 2.0 * model.heads * model.head_width * attended + 2 * index * attended / options.block_size
        return flops

    def scored(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Pairs of an index query and what it is compared with: every token before, or every block."""
        return full_pairs(lengths) / (self.options.block_size if self.pooled else 1)

    def _index_width(self, model: ModelConfig) -> int:
        return self.options.index_dim or model.head_width
