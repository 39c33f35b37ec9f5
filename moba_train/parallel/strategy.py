"""The context-parallel strategy of a training stage, derived from the recipe without any process group."""

import math

from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.parallel.context.policy import choose_strategy
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy


def stage_attention_shape(config: RunConfig, stage: Stage, element_bytes: int = 2) -> AttentionShape:
    """The shape of one layer's attention to one micro-batch, on one rank of a tensor-parallel group."""
    model = config.model
    return AttentionShape(
        tokens=stage.micro_batch_size * stage.seq_len,
        heads=model.heads // stage.parallel.tp,
        kv_heads=model.kv_heads // stage.parallel.tp,
        head_dim=model.head_width,
        element_bytes=element_bytes,
        couples_heads=any(_couples_heads(layer, model.head_width) for layer in set(stage.attention)),
    )


def stage_strategy(
    config: RunConfig, stage: Stage, ranks_per_node: int, element_bytes: int = 2, memory_bytes: float | None = None
) -> tuple[CPStrategy, str]:
    """The strategy of a stage with `parallel.cp` > 1, and the reason as lines to print.

    `ranks_per_node`: consecutive ranks of one machine. `memory_bytes`: the most that `auto` may spend on the buffers of
    a layer; None: no limit. Raises ValueError, naming the YAML key, when the configured transport cannot do these
    sizes.
    """
    parallel = stage.parallel
    same_heads_per_node = ranks_per_node // parallel.tp  # ranks of a node that hold the same heads
    return choose_strategy(
        parallel.cp_transport,
        parallel.cp_layout,
        stage_attention_shape(config, stage, element_bytes),
        ranks=parallel.cp,
        node_size=math.gcd(
            parallel.cp, same_heads_per_node
        ),  # the longest runs of consecutive ranks that stay in a node
        work_grows=any(KINDS[layer.kind].work_grows for layer in stage.attention),
        memory_bytes=memory_bytes,
        ring_depth=parallel.cp_ring_depth,
        slices=parallel.cp_slices,
    )


def _couples_heads(layer: LayerAttention, head_dim: int) -> bool:
    return KINDS[layer.kind](layer.options, head_dim).couples_heads
