"""The kind `moa`: what a recipe, a plan and an export need to know about attention in spans."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moba_train.attention.blocks.available import interpreted, triton_block_size, triton_limits
from moba_train.attention.kind import AttentionKind, LayerInput, StageContext
from moba_train.attention.moa.attention import SpanAttention
from moba_train.attention.moa.spans import SpanRule, Spans
from moba_train.attention.statistics import KEY_SHARE, SOFTMAX
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig


class MoaKind(AttentionKind):
    """Each head attends to the first tokens of the document and to a span of its own that ends with the query."""

    name = "moa"
    Options = SpanAttention.Options
    statistics = (
        SOFTMAX
        | KEY_SHARE
        | {"shortest_key_share": "that of the head with the shortest span", "longest_key_share": "with the longest"}
    )

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self._spans = SpanAttention(options, head_dim)
        self.attentions = (self._spans,)

    @classmethod
    def problems(cls, options: Section, context: StageContext) -> Iterator[str]:
        """Spans of another model, documents longer than the spans are for, tensor parallelism, a backend that cannot
        run."""
        assert isinstance(options, SpanAttention.Options)
        where = context.layers
        heads = context.model.heads
        if options.heads not in (None, heads):
            key = "alpha" if isinstance(options.alpha, tuple) else "beta"
            yield (
                f"{key}: given spans of {options.heads} heads {where}, but the model has {heads} query heads; allowed: "
                "one number, or one for each of them; profile a run of this model (moba-train profile-spans)"
            )
        if context.seq_len > options.max_length:
            yield (
                f"max_length: given {options.max_length} {where}, but documents may have the stage's {context.seq_len} "
                "tokens; allowed: at least seq_len"
            )
        if context.tp > 1:
            yield (
                f"parallel.tp: given {context.tp}, but kind 'moa' {where} has a span for each head, which tensor "
                "parallelism does not hand out; set tp: 1"
            )
        if options.backend == "triton" and (reason := _triton_refuses(options, context)):
            yield f"backend: given 'triton' {where}, which cannot run: {reason}; set auto"

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        """This rank's queries and all their heads against all keys, as a head's span goes by its number."""
        shard = layer.shard
        q_nHd = shard.own(layer.rotate(layer.q_THd))
        k_TKd = shard.gather("k", shard.own(layer.rotate(layer.k_TKd)))
        v_TKd = shard.gather("v", shard.own(layer.v_TKd))
        attention = self._spans.dense if shard.attends_to_all else self._spans
        out_nHd, _ = shard.attend(q_nHd, k_TKd, v_TKd, attention)
        return shard.padded(out_nHd), None

    def gathered_bytes(self, model: ModelConfig, width: int) -> int:
        """Keys and values."""
        return 2 * width * model.kv_heads * model.head_width

    def attended_pairs(self, lengths: Sequence[int]) -> float:
        """The mean over the heads."""
        lengths_n = torch.tensor(list(lengths), dtype=torch.int64)
        rules = Counter(self._spans.rules)
        return sum(count * rule.attended_pairs(lengths_n) for rule, count in rules.items()) / rules.total()


def _triton_refuses(options: SpanAttention.Options, context: StageContext) -> str:
    """Why the Triton kernels cannot attend in these spans; empty when they can."""
    if context.device not in (None, "cuda") and not interpreted():
        return f"the run trains on {context.device}, CUDA needed"
    reasons = (_rule_refuses(rule, context) for rule in set(options.rules()) if rule.block_size)
    return next(filter(None, reasons), "")


def _rule_refuses(rule: SpanRule, context: StageContext) -> str:
    selected = Spans((rule,)).most_history(context.seq_len)
    return triton_limits(context.model.head_width, selected) or triton_block_size(rule.block_size)
