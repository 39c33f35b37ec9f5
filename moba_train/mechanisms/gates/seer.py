"""The kind `seer`: SeerAttention (Gao et al. 2024, arXiv:2410.13276).

All queries of a block attend to the same blocks, each head to its own. The gate compares q and k, before the rotary
embedding, pooled over each block: the mean of q, and mean, maximum and minimum of k, each through a matrix of its own
for each head, rotated at the position of the block's first token as in the authors' code. It learns full attention's
map, max-pooled over blocks of queries and keys, each row divided by its sum.

Shape suffixes: n queries of this rank, N blocks, H query heads, K key/value heads, d head width, w width of the gate.
"""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.full.full_kind import full_pairs
from moba_train.attention.kind import LayerInput, MicroBatch, TokenBytes
from moba_train.attention.layout import layout_arguments
from moba_train.attention.shard import Shard, own_rows
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import seer_operators as operators
from moba_train.mechanisms.gates.distilled_gate import DistilledGate, Features, GateOptions, Teacher


class SeerGate(nn.Module):
    """A matrix for each query head and, for the three poolings of k together, one for each key/value head."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.q_weight = nn.Parameter(torch.empty(model.heads, width, width))
        self.k_weight = nn.Parameter(torch.empty(model.kv_heads, 3 * width, width))

    def forward(self, q_NHd: Tensor, k_NKp: Tensor) -> tuple[Tensor, Tensor]:
        """Features [N, H, w] and [N, K, w]."""
        return torch.einsum("nhd,hdw->nhw", q_NHd, self.q_weight), torch.einsum("nkp,kpw->nkw", k_NKp, self.k_weight)


class SeerKind(DistilledGate):
    """All queries of a block attend to the blocks that a gate on pooled q and k selects for each head."""

    name = "seer"

    class Options(GateOptions):
        """Options of `kind: seer`."""

        not_here = {"gate_dim": "gone: the gate is as wide as a head"}

        threshold: float | None = Field(
            None,
            gt=0,
            lt=1,
            description="of the topk blocks, only those with a larger share of the gate's softmax; null: all of them",
        )

    options: Options

    def __init__(self, options: Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        # The queries of a block select by their mean.
        problem = "" if options.mode == "warmup" else _OWN_DECODE_PROBLEM
        self.facts = self.facts._replace(prefill_unit=options.block_size, own_decode_problem=problem)

    @property
    def needs_full(self) -> bool:
        """True also in mode sparse while the gate learns: its target is the map of full attention."""
        return self.facts.learns

    @classmethod
    def parameters(cls, options: Options, model: ModelConfig, layer: int) -> nn.Module:
        return SeerGate(model)

    @classmethod
    def sampled_at_once(cls, options: GateOptions) -> int:
        """A block."""
        return options.block_size

    def features(self, layer: LayerInput, parameters: nn.Module) -> Features:
        """Features of every block's queries and keys, [N, H, w] and [N, K, w]; equal on all ranks of a sequence."""
        shard = layer.engine.shard(layer.layout)
        block_size = self.options.block_size
        positions_N, tokens_N = operators.blocks(*layout_arguments(shard.layout), block_size)
        rows = own_rows(layer.q_THd, shard).detach(), own_rows(layer.k_TKd, shard).detach()
        features = parameters(*_pooled(shard, *rows, tokens_N, block_size))
        q_NHw, k_NKw = (layer.rotate_at(x, positions_N) for x in features)
        return q_NHw, k_NKw

    def select(self, features: Features, shard: Shard, q_nHd: Tensor, k_TKd: Tensor) -> Tensor:
        """The blocks with the highest scores for each head and block of queries, the queries' own not counted."""
        options = self.options
        where = layout_arguments(shard.layout)
        return operators.select(
            *features, *where, len(q_nHd), options.block_size, options.history_blocks, options.threshold
        )

    def divergence(self, features: Features, shard: Shard, teacher: Teacher) -> Tensor:
        """Each query has the divergence of its block, the mean over heads."""
        q_nHd, k_TKd, lse_Hn, selected_HnC = teacher
        assert selected_HnC is None, "the gate learns the map of full attention"
        block_size = self.options.block_size
        where = layout_arguments(shard.layout)
        sizes = block_size, self.full.scale, self.options.backend == "reference"
        every = self.options.kl_every
        own_map, ids_E, rows_EHN = operators.attention_map(q_nHd, k_TKd, lse_Hn, *where, *sizes, every)
        edges = shard.all_ranks(ids_E), shard.all_ranks(rows_EHN)
        kl_n, _ = operators.distill(*features, own_map, *edges, *where, len(q_nHd), block_size, every)
        return kl_n

    def gate_flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Matrices and scores of blocks, and one more product of q and k if there is a map to learn."""
        options = self.options
        learns = self.facts.learns
        width = model.head_width
        blocks = [-(-length // options.block_size) for length in lengths]
        matrices = (model.heads + 3 * model.kv_heads) * model.head_width * width
        scores = model.heads * width * sum(count**2 for count in blocks) / 2
        gate = 2.0 * matrices * sum(blocks) * (2 if learns else 1)
        if options.mode == "sparse":
            gate += 2.0 * scores
        if not learns:
            return gate
        # Gradients of both factors of the scores; in the warm-up the scores themselves are those that learn.
        learned = scores * (2 if options.mode == "sparse" else 3)
        return gate + 2.0 * (learned + model.heads * model.head_width * full_pairs(lengths)) / options.kl_every

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Selected blocks, and while the gate learns its target: float32, blocks by blocks for each head."""
        found = super().token_bytes(model, batch)
        options = self.options
        target = 4 * model.heads * -(-batch.seq_len // options.block_size) // (options.block_size * options.kl_every)
        return found._replace(saved=found.saved + target) if self.facts.learns else found


_OWN_DECODE_PROBLEM = (
    "decode: own given, but attention.seer.mode 'sparse' selects from the mean query of a whole block, which is not "
    "known while its tokens are generated one by one; allowed: full, which reads the prompt with the selected blocks, "
    "as published"
)


@torch.no_grad()
def _pooled(shard: Shard, q_nHd: Tensor, k_nKd: Tensor, tokens_N: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Mean q [N, H, d], and mean, maximum and minimum of k [N, K, 3 d], of all blocks; zeros for ids without a
    block. `tokens_N`: of each block."""
    if len(shard.place.ranges_by_rank) == 1:
        # Also while a prompt is read in parts: the first block may have begun in the part before.
        *sizes, _ = layout_arguments(shard.layout)
        rows = shard.gather("q_unrotated", q_nHd), shard.gather("k_unrotated", k_nKd)
        sums_NHd, extremes_NKd = operators.pool(*rows, *sizes, [0, shard.layout.total], block_size)
    else:
        sums, extremes = operators.pool(q_nHd, k_nKd, *layout_arguments(shard.layout), block_size)
        sums_NHd = shard.all_ranks(sums).sum(0)
        extremes_NKd = shard.all_ranks(extremes).amax(0)
    tokens_N11 = tokens_N[:, None, None]
    heads, kv_heads = q_nHd.shape[1], k_nKd.shape[1]
    mean_NHd = sums_NHd / tokens_N11.clamp(min=1)
    extremes_NKd = extremes_NKd.masked_fill(tokens_N11 == 0, 0.0)
    q_NHd, k_NKd = mean_NHd.split([heads, kv_heads], 1)
    largest_NKd, smallest_NKd = extremes_NKd.split([kv_heads, kv_heads], 1)
    # The smallest came as the largest of -k.
    return q_NHd.to(q_nHd.dtype), torch.cat([k_NKd, largest_NKd, -smallest_NKd], -1).to(k_nKd.dtype)
