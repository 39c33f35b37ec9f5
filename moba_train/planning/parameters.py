"""Exact parameter counts of a model, from its shape alone."""

from dataclasses import dataclass

from moba_train.config.model import ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters by part; those of the blocks are summed over all layers."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    output: int
    """The output projection; 0 when it shares the embedding."""

    @property
    def total(self) -> int:
        """All parameters, a shared embedding counted once."""
        return self.without_embeddings + self.embedding + self.output

    @property
    def without_embeddings(self) -> int:
        """All parameters but the embedding and the output projection."""
        return self.attention + self.feed_forward + self.norms


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Parameters of the model, exact also with tied embeddings, `qkv_bias` and `qk_norm`."""
    vocabulary = model.vocab_size * model.hidden_size
    biases = (model.heads + 2 * model.kv_heads) * model.head_width if model.qkv_bias else 0
    head_norms = 2 * model.head_width if model.qk_norm else 0
    return ParameterCounts(
        embedding=vocabulary,
        attention=model.layers * (attention_matrices(model) + biases),
        feed_forward=model.layers * feed_forward_matrices(model),
        norms=model.layers * (2 * model.hidden_size + head_norms) + model.hidden_size,
        output=0 if model.tie_embeddings else vocabulary,
    )


def attention_matrices(model: ModelConfig) -> int:
    """Weights of one layer's query, key, value and output projections, without biases."""
    return 2 * model.hidden_size * (model.heads + model.kv_heads) * model.head_width


def feed_forward_matrices(model: ModelConfig) -> int:
    """Weights of one layer's SwiGLU: gate, up and down projection."""
    return 3 * model.hidden_size * model.intermediate_size
