"""Exact parameter counts of a model, from its shape and its attention kinds."""

from dataclasses import dataclass
from typing import NamedTuple

from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.model.build import kind_elements
from moba_train.planning.once import once_a_recipe


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
