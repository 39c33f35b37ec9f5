"""The context-parallel strategy of a stage, derived from the model and the stage without any process group."""

import math

from moba_train.attention.kind import MicroBatch
from moba_train.attention.protocol import AttentionFacts, LocalAttention
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.model.build import build_attention
from moba_train.parallel.context.costs import TransportCost, exchange_cost, gather_cost
from moba_train.parallel.context.policy import choose_strategy, predict_cost, transport_spec
from moba_train.parallel.context.strategy import AttentionShape, CPStrategy


def stage_attention_shape(model: ModelConfig, stage: Stage, element_bytes: int = 2) -> AttentionShape:
    """The shape of one layer's attention to one micro-batch, on one rank of a tensor-parallel group."""
    attentions = _attentions(model, stage)
    facts = AttentionFacts(
        couples_heads=any(attention.facts.couples_heads for attention in attentions),
        work_grows=any(attention.facts.work_grows for attention in attentions),
        # One strategy serves all layers of a stage, so the most demanding layer decides.
        merges=all(attention.facts.merges for attention in attentions),
    )
    return AttentionShape(
        tokens=stage.micro_batch_size * stage.seq_len,
        heads=model.heads // stage.parallel.tp,
        kv_heads=model.kv_heads // stage.parallel.tp,
        head_dim=model.head_width,
        element_bytes=element_bytes,
        facts=facts,
        attentions=attentions,
    )


def stage_costs(
    model: ModelConfig, stage: Stage, strategy: CPStrategy, element_bytes: int = 2
) -> dict[LayerAttention, TransportCost]:
    """The cost of context parallelism for a layer with each of the stage's attentions."""
    shape = stage_attention_shape(model, stage, element_bytes)
    costs = {}
    for layer, kind in zip(stage.attention, build_attention(stage.attention, model.head_width), strict=True):
        batch = MicroBatch(element_bytes, stage.seq_len, shape.tokens // strategy.ranks, strategy.ranks)
        gathered = kind.token_bytes(model, batch).gathered
        exchanges = [attention.facts.exchange for attention in kind.attentions]
        if gathered is not None:
            costs[layer] = gather_cost(strategy, shape.tokens, gathered / stage.parallel.tp)
        elif all(exchanges) and exchanges and transport_spec(strategy.transport).has_all_ranks:
            received = sum(exchange.received_tokens(strategy, shape.tokens) for exchange in exchanges)
            costs[layer] = exchange_cost(strategy, shape, received)
        else:
            costs[layer] = predict_cost(strategy, shape)
    return costs


def stage_strategy(
    model: ModelConfig, stage: Stage, ranks_per_node: int, element_bytes: int = 2, memory_bytes: float | None = None
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
        stage_attention_shape(model, stage, element_bytes),
        ranks=parallel.cp,
        # The longest runs of consecutive ranks that stay in a node.
        node_size=math.gcd(parallel.cp, same_heads_per_node),
        memory_bytes=memory_bytes,
    )


def _attentions(model: ModelConfig, stage: Stage) -> tuple[LocalAttention, ...]:
    """The local attentions of all layers, those that layers share once."""
    kinds = build_attention(stage.attention, model.head_width)
    return tuple(dict.fromkeys(attention for kind in kinds for attention in kind.attentions))
