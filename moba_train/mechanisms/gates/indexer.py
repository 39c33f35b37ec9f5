"""The kind `indexer`: tokens or blocks of a few tokens that a narrow indexer scores, after the lightning indexer of
DeepSeek Sparse Attention (arXiv:2512.02556, section 2.1) and RTPurbo (arXiv:2605.16928).

As in `qsa`, each group of query heads that share a key/value head has index queries and an index key of its own,
rotated at the tokens' positions, and a query scores the mean of a block's index keys: by the product of one index
query, or by a sum over several heads of positive products with weights of the query's token. Attended to are the first
block of the document, the last ones, and of the others the best: a fixed number (top-k) or as many as hold a share of
the scores' softmax (top-p).

The search may have two stages, as in HISA (arXiv:2603.28458): a gate on pooled keys, here MoBA's, which has no
parameters, keeps a few large blocks, and the indexer ranks what is inside them. Its work for a query then no longer
grows with the position.

Shape suffixes: n queries of this rank, T tokens of the sequence, D hidden size, H query heads, K key/value heads, J
index heads of a group, I = K * J, d head width, w index width, x and y features as in pooled_scores.py, C selected
blocks.
"""

from collections.abc import Iterator, Sequence

import torch
from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.kind import LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import LayoutArguments
from moba_train.attention.moba.moba_kind import attended_pairs, gate_flops
from moba_train.attention.shard import own_rows
from moba_train.config.base import Length, Section
from moba_train.config.model import LARGEST_WIDTH, ModelConfig
from moba_train.mechanisms.gates import index_operators as operators
from moba_train.mechanisms.gates.distilled_gate import Features
from moba_train.mechanisms.gates.msa import IndexBranch
from moba_train.mechanisms.gates.qsa import QsaKind


class Coarse(Section):
    """The first of two stages: MoBA's gate."""

    block_size: Length = Field(512, description="tokens per coarse block, a multiple of the kind's block_size")
    blocks: int = Field(
        16,
        ge=3,
        description="coarse blocks in which a query's blocks are searched; its own, the one before and the document's "
        "first are among them",
    )


class IndexerKind(QsaKind):
    """The query heads of a group attend to the tokens or short blocks that a narrow indexer scores highest."""

    name = "indexer"

    class Options(QsaKind.Options):
        """Options of `kind: indexer`."""

        block_size: Length = Field(
            16, description="tokens per block; blocks start again with each document; 1: single tokens are selected"
        )
        topk: int = Field(
            128, ge=1, description="blocks each query attends to, its own included; with top_p, the most that it may"
        )
        first_blocks: int = Field(
            1, ge=0, description="blocks at a document's start that every query attends to; they count towards topk"
        )
        local_blocks: int = Field(
            8, ge=1, description="last blocks up to its own that every query attends to; they count towards topk"
        )
        top_p: float | None = Field(
            None,
            gt=0,
            lt=1,
            description="of the best blocks, the fewest whose shares in the softmax of the scores add up to this, with "
            "those of the first and last ones; null: topk blocks",
        )
        index_dim: int = Field(32, ge=2, le=LARGEST_WIDTH, multiple_of=2, description="width of index queries and keys")
        index_heads: int | None = Field(
            None,
            ge=1,
            description="index queries of a group, whose positive products are added with weights of the token, as in "
            "DeepSeek's lightning indexer; null: one, whose product is the score",
        )
        coarse: Coarse | None = Field(
            None, description="first stage of the search, MoBA's gate on larger blocks; null: every block is scored"
        )

        @property
        def forced(self) -> tuple[int, int]:
            """First blocks of a document, and last ones up to a query's own, that the query attends to in any case."""
            return self.first_blocks, self.local_blocks

    options: Options

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Those of the base class, more forced blocks than are attended to, and coarse blocks that do not consist of
        whole blocks or do not hold the forced ones."""
        assert isinstance(options, IndexerKind.Options)
        yield from super().problems(options, context)
        first, local = options.forced
        if options.topk < first + local:
            yield (
                f"topk: given {options.topk} {context.layers}, but first_blocks {first} and local_blocks {local} count "
                f"towards it; allowed: at least {first + local}"
            )
        if options.coarse is None:
            return
        least = max(first, local - 1, 1) * options.block_size
        if options.coarse.block_size % options.block_size or options.coarse.block_size < least:
            yield (
                f"coarse.block_size: given {options.coarse.block_size} {context.layers}; allowed: a multiple of "
                f"block_size {options.block_size} from {least}, as one coarse block must hold the first_blocks, and "
                "two the local_blocks"
            )

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        assert isinstance(options, IndexerKind.Options)
        return Indexer(model, options.index_dim, options.index_heads)

    @classmethod
    def normalises(cls, model: ModelConfig) -> bool:
        """True if index queries and keys are normalised: where the model normalises q and k."""
        return bool(model.qk_norm)

    def features(self, layer: LayerInput, parameters: nn.Module) -> Features:
        """Features [n, K, x] of this rank's queries, and index keys of all tokens, [T, y]."""
        q_nIw, k_Ty = super().features(layer, parameters)
        assert isinstance(parameters, Indexer)
        groups = parameters.groups
        q_nKy = q_nIw.unflatten(1, (groups, -1)).flatten(2)
        if parameters.weights is None:
            return q_nKy, k_Ty
        x_nD = own_rows(layer.x_TD, layer.engine.shard(layer.layout)).detach()
        return torch.cat([q_nKy, parameters.weights(x_nD).unflatten(-1, (groups, -1))], -1), k_Ty

    def select_by_group(self, features: Features, where: LayoutArguments, q_nHd: Tensor, k_TKd: Tensor) -> Tensor:
        """int32 [K, n, C]: the selected history blocks of each group."""
        options = self.options
        reference = options.backend == "reference"
        coarse_KnC = None
        if options.coarse is not None:  # its truth would break the graph of torch 2.11, in which nothing then compiles
            rule = options.coarse.block_size, options.coarse.blocks, reference
            coarse_KnC = operators.coarse_blocks(q_nHd.detach(), k_TKd.detach(), *where, *rule)
        coarse_size = 0 if options.coarse is None else options.coarse.block_size
        sizes = options.block_size, options.history_blocks, self.pooled, reference
        return operators.select(*features, coarse_KnC, *where, *sizes, *options.forced, options.top_p, coarse_size)

    @property
    def index_heads(self) -> int:
        """Index queries of a group."""
        return self.options.index_heads or 1

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Those of the index branch; while several heads learn, their queries are kept with the weights as well."""
        found = super().token_bytes(model, batch)
        heads = self.options.index_heads
        if not (heads and self.facts.learns):
            return found
        joined = batch.width * model.kv_heads * heads * (self._index_width(model) + 1)
        return found._replace(activations=found.activations + joined)

    def gate_flops(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Those of the index branch, of its weights, and of MoBA's gate."""
        options = self.options
        weights = model.hidden_size * model.kv_heads * (options.index_heads or 0)
        flops = super().gate_flops(model, lengths) + 2.0 * weights * sum(lengths) * (2 if self.facts.learns else 1)
        return flops + (gate_flops(model, lengths, options.coarse.block_size) if options.coarse else 0.0)

    def scored(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """Every block before; in two stages, those of the coarse blocks."""
        options = self.options
        if not options.coarse:
            return super().scored(model, lengths)
        coarse = options.coarse
        return sum(attended_pairs(length, coarse.block_size, coarse.blocks) for length in lengths) / options.block_size


class Indexer(IndexBranch):
    """An index branch with `heads` index queries for each group and their weights; None: one, without."""

    def __init__(self, model: ModelConfig, width: int, heads: int | None) -> None:
        super().__init__(model, width, model.kv_heads, IndexerKind.normalises(model), heads or 1)
        self.groups = model.kv_heads
        self.weights = nn.Linear(model.hidden_size, model.kv_heads * heads, bias=False) if heads else None
