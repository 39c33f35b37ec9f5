"""How the sequences of a training stage are cut over ranks: from the recipe to a scheme, without any process group."""

import math

from moba_train.attention.protocol import LocalAttention
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.parallel.context.choose import Scheme, Shape, choose


def stage_shape(config: RunConfig, stage: Stage, element_bytes: int = 2) -> Shape:
    """The attention of one layer to one micro-batch, as its transport sees it."""
    model = config.model
    return Shape(
        tokens=stage.micro_batch_size * stage.seq_len,
        heads=model.heads // stage.parallel.tp,
        kv_heads=model.kv_heads // stage.parallel.tp,
        head_dim=model.head_width,
        element_bytes=element_bytes,
        couples_heads=any(attention.couples_heads for attention in _attentions(config, stage)),
    )


def stage_scheme(
    config: RunConfig, stage: Stage, ranks_per_node: int, element_bytes: int = 2, memory_bytes: float | None = None
) -> tuple[Scheme, str]:
    """The scheme of a stage with `parallel.cp` > 1, and why, in lines to print.

    `ranks_per_node`: consecutive ranks of one machine. `memory_bytes`: what `auto` may spend on a layer's buffers.
    Raises ValueError, naming the key, for what the transport asked for cannot do.
    """
    parallel = stage.parallel
    per_node = ranks_per_node // parallel.tp  # of the ranks that hold the same heads
    return choose(
        parallel.cp_transport,
        parallel.cp_layout,
        stage_shape(config, stage, element_bytes),
        ranks=parallel.cp,
        node=math.gcd(parallel.cp, per_node),  # the longest runs of neighbours that never leave a node
        work_grows=any(attention.work_grows for attention in _attentions(config, stage)),
        memory_bytes=memory_bytes,
        ring_depth=parallel.cp_ring_depth,
        slices=parallel.cp_slices,
    )


def _attentions(config: RunConfig, stage: Stage) -> set[LocalAttention]:
    """The local attentions of all layers."""
    kinds = build_attention(stage.attention, config.model.head_width)
    return {attention for kind in kinds for attention in kind.attentions}
