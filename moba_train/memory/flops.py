"""Floating-point operations of training, forward and backward, and the documents whose lengths attention depends on.

A multiply-add counts as two operations and the backward pass as twice the forward pass, so a weight costs 6 per token
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Recomputation is not counted, as in model FLOPs utilisation
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B), nor are norms, activations and softmax. Each
attention kind counts its own operations, document by document: a packed sequence is not one long document.

Symbols: T tokens of a sequence, H query heads, d head width.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.data.loader import DataSpec, training_data
from moba_train.model.build import build_attention
from moba_train.model.feed_forward import feed_forward_costs
from moba_train.model.spec import attention_matrices
from moba_train.parallel.activations import Kept

READ_TOKENS = 1 << 26
"""Tokens of a stage whose document lengths are read. 64M tokens in documents of 500 tokens on average took 0.7 s on one
CPU core."""
READ_SEQUENCES = 1 << 13
"""And its sequences: short ones take as long each, and a run begins when rank 0 has printed its plan."""


@dataclass(frozen=True)
class Documents:
    """Lengths of the documents in some sequences of a stage, in tokens."""

    lengths: tuple[int, ...]
    """Document parts in the order of the sequences, padding included as a document of its own, as it is computed."""
    from_corpora: bool
    """False: the corpora were not found, and each sequence counts as one document."""
    warnings: tuple[str, ...] = ()
    """Sentences about the corpora (`StageData.warnings`)."""

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(self.lengths)

    @property
    def source(self) -> str:
        """Origin of the lengths, as a phrase to print."""
        return "documents of the corpora" if self.from_corpora else "one document per sequence: corpora not found"


def stage_documents(data: DataSpec, stage: Stage) -> Documents:
    """Documents of the first sequences of `stage`, at most `READ_TOKENS` tokens or `READ_SEQUENCES`, at least one.

    The sequences are those that training makes of the stage's corpora, blended and packed alike, when the stage begins
    at the start of their document order. A later stage goes on where the one before stopped; as the order is random,
    its documents are as long on average. Tokens are not read, only lengths. If a file of a corpus is missing (from the
    working directory), one sequence that is a single document. Raises DataError for a corpus that is damaged, empty, or
    made for a larger vocabulary.
    """
    files = [corpus_file(source.path, end) for source in stage.sources for end in ("bin", "idx")]
    if not all(file.is_file() for file in files):
        return Documents((stage.seq_len,), from_corpora=False)
    sequences = min(stage.steps * stage.batch_sequences, max(1, READ_TOKENS // stage.seq_len), READ_SEQUENCES)
    samples = training_data(data, stage, starts={})
    return Documents(
        tuple(length for index in range(sequences) for length in samples.lengths(index)),
        from_corpora=True,
        warnings=tuple(samples.warnings(stage.batch_tokens)),
    )


def matmul_flops(model: ModelConfig) -> float:
    """FLOPs per token of all matrix products with weights that it passes through, 6 per weight. Includes the output
    projection (6 V D) and excludes the embedding lookup."""
    layers = range(model.layers)
    weights = sum(attention_matrices(model, layer) + feed_forward_costs(model, layer).active for layer in layers)
    return 6.0 * (weights + model.vocab_size * model.hidden_size)


def kept_flops(model: ModelConfig, stage: Stage, layer: int) -> dict[Kept, float]:
    """FLOPs per token of one layer's forward pass whose results each policy keeps: attention's, and 2 for each weight
    of the products. The down projection's result is neither kept nor recomputed."""
    attention = layer_flops(model, stage.attention[layer], [stage.seq_len]) / stage.seq_len / 3
    found = {
        Kept.ATTENTION: attention,
        Kept.PROJECTIONS: 2.0 * attention_matrices(model, layer),
        Kept.PRODUCTS: 2.0 * feed_forward_costs(model, layer).active * 2 / 3,
    }
    return {kept: sum(flops for level, flops in found.items() if level <= kept) for kept in Kept}


def repeated_flops(model: ModelConfig, stage: Stage, layer: int, kept: Kept) -> float:
    """FLOPs per token that the backward pass of one layer repeats."""
    flops = kept_flops(model, stage, layer)
    return flops[Kept.ALL] - flops[kept]


def dense_flops(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token as if every layer had dense causal attention over the full sequence, 6 H d T a layer.

    The formula behind published MFU numbers of causal models, e.g. in FlashAttention's benchmarks (Dao 2023,
    arXiv:2307.08691, section 4.1: half the operations of full attention).
    """
    return matmul_flops(model) + 6.0 * model.layers * model.heads * model.head_width * seq_len


def real_flops(model: ModelConfig, layers: Sequence[LayerAttention], lengths: Sequence[int]) -> float:
    """FLOPs of a batch whose documents have these `lengths` (tokens), counted by each layer's attention kind."""
    attention = sum(count * layer_flops(model, layer, lengths) for layer, count in Counter(layers).items())
    return matmul_flops(model) * sum(lengths) + attention


def layer_flops(model: ModelConfig, layer: LayerAttention, lengths: Sequence[int]) -> float:
    """FLOPs of one layer's attention in documents of these lengths, without its four projections."""
    (kind,) = build_attention([layer], model.head_width)
    return kind.flops(model, lengths)
