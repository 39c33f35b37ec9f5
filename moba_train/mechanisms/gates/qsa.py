"""The kind `qsa`: entries of four tokens that an indexer scores, after Qwen's sparse attention (Qwen3.8-Flash-Next).

An index query and an index key for each group of query heads that share a key/value head, RMS-normalised and rotated;
index keys are averaged over an entry, and the query's product with the mean is the entry's score. The heads of a group
attend to the same entries, and to their own, which is not complete yet. The indexer learns the group's own attention:
the share of the probability in each entry before a query's own.

Attention to such short blocks has kernels of its own; scores are plain PyTorch, a chunk of queries at a time.
"""

from pydantic import Field

from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.kernels.table import TRITON
from moba_train.attention.kind import StageContext
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import short_blocks
from moba_train.mechanisms.gates.distilled_gate import GateOptions
from moba_train.mechanisms.gates.msa import IndexOptions, MsaKind


class QsaKind(MsaKind):
    """The query heads of a group attend to the entries that an indexer scores highest."""

    name = "qsa"
    pooled = True

    class Options(IndexOptions):
        """Options of `kind: qsa`."""

        block_size: Length = Field(4, description="tokens per entry; entries start again with each document")
        topk: int = Field(512, ge=1, description="entries each query attends to, its own included; 1: own entry only")

    @classmethod
    def normalises(cls, model: ModelConfig) -> bool:
        """True always."""
        return True

    @classmethod
    def key_heads(cls, options: Section, model: ModelConfig) -> int:
        """Index keys of a token: one of each group."""
        return model.kv_heads

    @classmethod
    def attends_by(cls, options: GateOptions, head_dim: int) -> type[GivenBlocks]:
        """Attention to short blocks, unless the kernels of MoBA take these sizes."""
        moba = not TRITON.size_problem(head_dim, options.block_size, options.history_blocks)
        return GivenBlocks if moba or options.backend == "composed" else short_blocks.ShortBlocks

    @classmethod
    def triton_problem(cls, options: GateOptions, context: StageContext) -> str:
        """The reason why the kernels of this attention cannot run in a stage; empty if they can."""
        width = context.model.head_width
        if cls.attends_by(options, width) is GivenBlocks:
            return super().triton_problem(options, context)
        return short_blocks.triton_problem(context.device, width)
