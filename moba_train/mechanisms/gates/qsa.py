"""The kind `qsa`: entries of four tokens that an indexer scores, after Qwen's sparse attention (Qwen3.8-Flash-Next).

An index query and an index key for each group of query heads that share a key/value head, RMS-normalised and rotated;
index keys are averaged over an entry, and the query's product with the mean is the entry's score. The heads of a group
attend to the same entries, and to their own, which is not complete yet. The indexer learns the group's own attention:
the share of the probability in each entry before a query's own.

There are no kernels for such short blocks: attention and scores are plain PyTorch, a chunk of queries at a time.

Shape suffixes: n queries of this rank, H query heads, K key/value heads, d head width, T tokens, C selected entries.
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor, nn

from moba_train.attention.layout import layout_arguments
from moba_train.attention.shard import Shard
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import qsa_operators as operators
from moba_train.mechanisms.gates.distilled_gate import Features
from moba_train.mechanisms.gates.msa import IndexBranch, MsaCosts, MsaKind


class QsaKind(MsaKind):
    """The query heads of a group attend to the entries that an indexer scores highest."""

    name = "qsa"

    class Options(MsaKind.Options):
        """Options of `kind: qsa`."""

        block_size: Length = Field(4, description="tokens per entry; entries start again with each document")
        topk: int = Field(512, ge=1, description="entries each query attends to, its own included; 1: own entry only")

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        assert isinstance(options, QsaKind.Options)
        return IndexBranch(model, options.index_dim or model.head_width, model.kv_heads, norms=True)

    def select(self, features: Features, shard: Shard, q_nHd: Tensor) -> Tensor:
        """The entries with the highest scores, equal for the heads of a group."""
        options = self.gate_options
        where = layout_arguments(shard.layout)
        selected_KnC = operators.select(*features, *where, options.block_size, options.history_blocks)
        return selected_KnC.repeat_interleave(q_nHd.shape[1] // len(selected_KnC), 0)

    def divergence(
        self,
        features: Features,
        shard: Shard,
        q_nHd: Tensor,
        k_TKd: Tensor,
        lse_Hn: Tensor,
        selected_HnC: Tensor | None,
    ) -> Tensor:
        """The mean over groups."""
        group = q_nHd.shape[1] // k_TKd.shape[1]
        selected_KnC = None if selected_HnC is None else selected_HnC[::group]
        where = layout_arguments(shard.layout)
        sizes = self.gate_options.block_size, self.full.scale
        return operators.distill(*features, q_nHd, k_TKd, lse_Hn, selected_KnC, *where, *sizes)

    def costs(self, model: ModelConfig) -> "QsaCosts":
        """Costs of attention and the indexer."""
        return QsaCosts(self, model)


class QsaCosts(MsaCosts):
    """Costs of a layer with an indexer of entries."""

    def __init__(self, kind: QsaKind, model: ModelConfig) -> None:
        super().__init__(kind, model)
        self.key_heads = model.kv_heads

    def scored(self, lengths: Sequence[int]) -> float:
        """Every entry before."""
        return super().scored(lengths) / self.kind.gate_options.block_size
