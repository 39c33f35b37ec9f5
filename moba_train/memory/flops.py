"""The documents that a stage's sequences are packed from: attention costs what their lengths make it cost.

Exact parameter counts of a model, from its shape and its attention kinds.

Floating-point operations of training, forward and backward.

A multiply-add counts as two operations and the backward pass as twice the forward pass, so a weight costs 6 per token
(Kaplan et al. 2020, arXiv:2001.08361, section 2.1). Recomputation is not counted, as in model FLOPs utilisation
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B), nor are norms, activations and softmax. Each
attention kind counts its own operations, document by document: a packed sequence is not one long document.

Symbols: T tokens of a sequence, H query heads, d head width.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.data.indexed import corpus_file
from moba_train.data.loader import training_data
from moba_train.memory.once import once_a_recipe
from moba_train.model.build import build_attention, kind_elements
from moba_train.parallel.activations import Kept, LayerActivations

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
    repeats: tuple[str, ...] = ()
    """A sentence for each corpus that is smaller than a batch (`StageData.repeats`)."""

    @property
    def tokens(self) -> int:
        """Tokens in all documents."""
        return sum(self.lengths)

    @property
    def source(self) -> str:
        """Origin of the lengths, as a phrase to print."""
        return "documents of the corpora" if self.from_corpora else "one document per sequence: corpora not found"


def stage_documents(config: RunConfig, stage: Stage) -> Documents:
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
    data = training_data(config, stage, starts={})
    return Documents(
        tuple(length for index in range(sequences) for length in data.lengths(index)),
        from_corpora=True,
        repeats=tuple(data.repeats(stage.batch_tokens)),
    )


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by part; those of the blocks are summed over all layers."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    output: int
    """Output projection; 0 when it is tied to the embedding."""
    attention_kinds: int = 0
    """Parameters that attention kinds add to the layers."""

    @property
    def total(self) -> int:
        """All parameters, a tied embedding counted once."""
        return self.without_embeddings + self.embedding + self.output

    @property
    def without_embeddings(self) -> int:
        """All parameters but the embedding and the output projection."""
        return self.attention + self.feed_forward + self.norms + self.attention_kinds


def count_parameters(model: ModelConfig, attention_kinds: int = 0) -> ParameterCounts:
    """Parameters of the model, exact also with tied embeddings, `qkv_bias` and `qk_norm`.

    attention_kinds: parameters that attention kinds add, over all layers.
    """
    vocabulary = model.vocab_size * model.hidden_size
    biases = (model.heads + 2 * model.kv_heads) * model.head_width if model.qkv_bias else 0
    head_norms = 2 * model.head_width if model.qk_norm else 0
    return ParameterCounts(
        embedding=vocabulary,
        attention=model.layers * (attention_matrices(model) + biases),
        feed_forward=model.layers * feed_forward_matrices(model),
        norms=model.layers * (2 * model.hidden_size + head_norms) + model.hidden_size,
        output=0 if model.tie_embeddings else vocabulary,
        attention_kinds=attention_kinds,
    )


@once_a_recipe
def count_recipe_parameters(config: RunConfig) -> ParameterCounts:
    """Parameters of the recipe's model, those of the attention kinds of all its stages included."""
    return count_parameters(config.model, sum(parameters for parameters, _ in kind_elements(config)))


class BlockCounts(NamedTuple):
    """Numbers of parameters of one block, those of its attention kinds included."""

    parameters: int
    matrices: int
    """Those in the weights of linear layers (`optim.spec.block_matrices`)."""


@once_a_recipe
def count_blocks(config: RunConfig) -> tuple[BlockCounts, ...]:
    """Parameters of each block of the recipe's model, those of the attention kinds of all its stages included."""
    model = config.model
    last_norm = model.hidden_size
    parameters = (count_parameters(model).without_embeddings - last_norm) // model.layers
    matrices = attention_matrices(model) + feed_forward_matrices(model)
    return tuple(
        BlockCounts(parameters + of_kinds, matrices + in_linears) for of_kinds, in_linears in kind_elements(config)
    )


def attention_matrices(model: ModelConfig) -> int:
    """Weights of one layer's query, key, value and output projections, without biases."""
    return 2 * model.hidden_size * (model.heads + model.kv_heads) * model.head_width


def feed_forward_matrices(model: ModelConfig) -> int:
    """Weights of one layer's SwiGLU: gate, up and down projection."""
    return 3 * model.hidden_size * model.intermediate_size


def matmul_flops(model: ModelConfig) -> float:
    """FLOPs per token of all matrix products with weights, 6 per weight. Includes the output projection (6 V D) and
    excludes the embedding lookup."""
    weights = model.layers * (attention_matrices(model) + feed_forward_matrices(model))
    return 6.0 * (weights + model.vocab_size * model.hidden_size)


def kept_flops(model: ModelConfig, stage: Stage, layer: int, kept: Kept) -> float:
    """FLOPs per token of one layer's forward pass whose results are kept: attention's, and 2 for each weight of the
    products. The down projection's result is neither kept nor recomputed."""
    attention = layer_flops(model, stage.attention[layer], [stage.seq_len]) / stage.seq_len / 3
    found = {
        Kept.ATTENTION: attention,
        Kept.PROJECTIONS: 2.0 * attention_matrices(model),
        Kept.PRODUCTS: 2.0 * feed_forward_matrices(model) * 2 / 3,
    }
    return sum(flops for level, flops in found.items() if level <= kept)


def recomputed_flops(model: ModelConfig, stage: Stage, layers: Sequence[LayerActivations]) -> float:
    """FLOPs per token that the backward pass repeats because the layers do not keep their results."""
    return sum(repeated_flops(model, stage, index, layer.kept) for index, layer in enumerate(layers))


def repeated_flops(model: ModelConfig, stage: Stage, layer: int, kept: Kept) -> float:
    """FLOPs per token that the backward pass of one layer repeats."""
    return kept_flops(model, stage, layer, Kept.ALL) - kept_flops(model, stage, layer, kept)


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
