"""Predicted seconds of one layer and one micro-batch on a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from moba_train.config.attention import LayerAttention
from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.memory.flops import Documents, attention_matrices, feed_forward_matrices, layer_flops
from moba_train.memory.layer_memory import block_bytes
from moba_train.memory.memory import element_bytes
from moba_train.memory.plan import repeated_transfers
from moba_train.parallel.activations import Kept
from moba_train.parallel.context.costs import TransportCost
from moba_train.parallel.links import Links
from moba_train.tools.plan.rates import Rates, attention_rate

TENSOR_TRANSFERS = 8
"""Transfers of tensor parallelism in a block's forward and backward pass."""
_CONTEXT_TRANSFERS = 3
"""Keys and values in the forward and the backward pass, and their gradients."""
_NOT_OVERLAPPED = 2
"""Those that `tp_overlap` does not hide (parallel/tensor.py)."""


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer, forward and backward."""

    products: float
    """Matrix products with weights."""
    attention: float
    memory: float
    """Norms, rotary embedding, SwiGLU and residual sums: they only read and write memory."""
    repeated: float
    """What the backward pass computes again."""
    tp: float
    """Communication of tensor parallelism that nothing hides."""
    cp: float
    """Communication and copies of context parallelism that attention does not hide."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def forward(self) -> float:
        """Seconds of the forward pass, a third of what is computed once."""
        return (self.products + self.attention + self.memory + self.tp + self.cp) / 3

    @property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return self.seconds - self.forward


AttentionFlops = Mapping[LayerAttention, float]
"""Operations for each token, forward and backward, of the attentions of a stage's layers."""


def attention_flops(config: RunConfig, stage: Stage, documents: Documents) -> AttentionFlops:
    """Those of a stage whose sequences hold `documents`."""
    layers = dict.fromkeys(stage.attention)
    return {layer: layer_flops(config.model, layer, documents.lengths) / documents.tokens for layer in layers}


class LayerTimes:
    """The layers of a stage on a mesh of these sizes."""

    def __init__(
        self,
        config: RunConfig,
        stage: Stage,
        sizes: MeshSizes,
        flops: AttentionFlops,
        transport: TransportCost | None,
        cp_nodes: int,
        links: Links,
        rates: Rates,
    ) -> None:
        """transport: of one layer under context parallelism, over `cp_nodes` nodes."""
        self._config = config
        self._stage = stage
        self._tp = sizes.tp
        self._flops = flops
        self._transport = transport
        self._cp_nodes = cp_nodes
        self._links = links
        self._rates = rates
        self._tokens = stage.micro_batch_size * stage.seq_len / sizes.cp  # of a tp group

    def layer(self, attention: LayerAttention, kept: Kept) -> LayerTime:
        """A layer with this attention that keeps so much for its backward pass."""
        model, tokens, rates = self._config.model, self._tokens / self._tp, self._rates
        forward_s, attention_s = self._attention(attention)
        float8 = self._config.precision.linear == "fp8"
        product_s = 2 * tokens / (rates.float8_products if float8 else rates.products)  # of a weight, forward
        width = element_bytes(self._config)
        # In FP8, too, the inputs of products are read and written in the layer's precision.
        block = block_bytes(model, width, self._tp, self._config.compile, input_width=width)
        passes = rates.compiled_passes if self._config.compile else rates.eager_passes
        memory_s = passes * (block.attention + block.feed_forward) * tokens / rates.memory
        repeated = 0.0 if kept is Kept.ALL else memory_s / 3
        repeated += forward_s if kept < Kept.ATTENTION else 0.0
        repeated += product_s * attention_matrices(model) if kept < Kept.PROJECTIONS else 0.0
        repeated += product_s * feed_forward_matrices(model) * 2 / 3 if kept < Kept.PRODUCTS else 0.0
        return LayerTime(
            products=3 * product_s * (attention_matrices(model) + feed_forward_matrices(model)),
            attention=attention_s,
            memory=memory_s,
            repeated=repeated,
            tp=self.tensor_bytes(kept, exposed=True) / self._links.node,
            cp=self._context_seconds(attention_s),
        )

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the residual stream, over the ranks of a tp group."""
        return self._tokens * self._config.model.hidden_size * element_bytes(self._config)

    def tensor_bytes(self, kept: Kept, exposed: bool = False) -> float:
        """Bytes that a rank receives from its tp group for a layer; `exposed`: those that nothing hides."""
        overlapped = exposed and self._config.parallel.tp_overlap
        transfers = (_NOT_OVERLAPPED if overlapped else TENSOR_TRANSFERS) + repeated_transfers(kept)
        return transfers * self.hidden_bytes * (1 - 1 / self._tp)

    def output_seconds(self) -> float:
        """Seconds of the output projection and its loss."""
        model, rates = self._config.model, self._rates
        logits = self._tokens / self._tp * model.vocab_size
        passed = rates.compiled_loss_bytes if self._config.compile else rates.eager_loss_bytes
        return logits * (6 * model.hidden_size / rates.products + passed / rates.memory)

    def output_tensor_bytes(self) -> float:
        """Bytes that a rank receives from its tp group for the loss, which nothing hides: the parts of the output
        weight, and those of its gradient."""
        model = self._config.model
        weight = element_bytes(self._config) * model.vocab_size * model.hidden_size
        return 2 * weight * (1 - 1 / self._tp)

    def _context_seconds(self, attention_s: float) -> float:
        """What attention of `attention_s` seconds does not hide of context parallelism."""
        if self._transport is None:
            return 0.0
        hops = _CONTEXT_TRANSFERS * (self._cp_nodes - 1)
        exposed_s = self._transport.exposed_seconds(attention_s, self._links, self._rates.memory)
        return exposed_s + hops * self._links.hop_s

    def _attention(self, layer: LayerAttention) -> tuple[float, float]:
        """Seconds of the forward pass, and of both."""
        rate = attention_rate(layer, self._config.model.head_width, self._stage.seq_len)
        flops = self._flops[layer] * self._tokens / self._tp / self._rates.attention_speed(layer)
        return flops / 3 / rate.forward, flops / rate.both
