"""The kind `moa`: attention in spans. Heads whose blocks have one size go to the block kernels together.

Shape suffixes: T queries, S keys, H query heads, h some of them, K key/value heads, k some of them, D head width,
N blocks of the packed sequence, C history blocks of a query.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, Strict, model_validator
from torch import Tensor, nn

from moba_train.attention.facets import Probed, SelectedBlocks
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.block_attention import BlockAttention
from moba_train.attention.kernels.common.geometry import block_bound, block_ids, first_blocks
from moba_train.attention.kernels.common.reference import accumulation_dtype
from moba_train.attention.kernels.common.selection import KEY_SHARE, key_share
from moba_train.attention.kernels.table import triton_problem
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, StageContext, TokenBytes
from moba_train.attention.layout import Layout
from moba_train.attention.protocol import BackwardState, Gradients, LocalAttention, Selection
from moba_train.attention.shard import attends_to_all, own_rows, padded
from moba_train.attention.statistics import SOFTMAX, Statistics, joined
from moba_train.config.base import Length, Section
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.moa.spans import SpanRule, Spans

_IDS_BYTES = 2**26
"""Block ids and their lists in memory at once, or half of what q has, whichever is more."""

Tokens = Annotated[int, Strict()]
Share = Annotated[float, Field(ge=0, le=1)]


class SpanAttention(LocalAttention, Probed):
    """Each head attends to the sinks and to its own span, whatever queries and keys hold (spans.py).

    Block ids are never kept: they follow from the layout, and both passes compute them for some heads at a time.
    """

    class Options(Section):
        """Options of `kind: moa`."""

        alpha: Tokens | tuple[Tokens, ...] = Field(
            2048, description="tokens of a span: one number, or a list with one for each query head"
        )
        beta: Share | tuple[Share, ...] = Field(
            0.0, description="share of the document's tokens so far that is added to a span: one number, or a list"
        )
        sink_tokens: int = Field(64, ge=0, description="tokens at a document's start that all of it attends to")
        block_size: Length = Field(
            64,
            description="tokens per block, to which spans and sinks are rounded up; 4, 16, ... times as many for heads "
            "whose span of a document of max_length tokens would have more than 32 blocks",
        )
        max_length: Length = Field(
            131_072,
            description="tokens of the longest document that the spans are for; heads whose span then holds all of it "
            "have full attention in every document",
        )
        backend: Literal["auto", "triton", "composed", "reference"] = Field(
            "auto", description="as in `moba`; auto: dense attention for heads that attend to everything"
        )

        @model_validator(mode="after")
        def _one_number_of_heads(self) -> Self:
            counts = {key: len(value) for key in ("alpha", "beta") if isinstance(value := getattr(self, key), tuple)}
            if 0 in counts.values() or len(set(counts.values())) > 1:
                given = " and ".join(f"{key} {count}" for key, count in counts.items())
                raise ValueError(f"alpha and beta: lists need one number for each query head; given: {given}")
            return self

        @property
        def heads(self) -> int | None:
            """Query heads that the lists are for; None: every head has the same span."""
            lists = [value for value in (self.alpha, self.beta) if isinstance(value, tuple)]
            return len(lists[0]) if lists else None

        def rules(self) -> tuple[SpanRule, ...]:
            """The rule of each head, or one for all."""
            heads = self.heads or 1
            alphas = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,) * heads
            betas = self.beta if isinstance(self.beta, tuple) else (self.beta,) * heads
            sizes = {"block_size": self.block_size, "sink_tokens": self.sink_tokens, "max_length": self.max_length}
            return tuple(SpanRule.fitted(alpha, beta, **sizes) for alpha, beta in zip(alphas, betas, strict=True))

    def __init__(self, options: Options, head_dim: int) -> None:
        self.options = options
        self.rules = options.rules()
        self.scale = head_dim**-0.5
        backend = "reference" if options.backend == "reference" else "auto"
        self.dense = FullAttention(FullAttention.Options(backend=backend), head_dim)

    def selected_by(self, rows_n: Tensor, selection: Selection, layout: Layout) -> SelectedBlocks | None:
        """The history of some of the layout's queries, in the shortest blocks that heads have; None if it is complete
        for all."""
        block_size = self.options.block_size
        if not any(rule.block_size for rule in self.rules):
            return None
        tokens_n, documents_n = layout.q_tokens[rows_n], layout.q_documents[rows_n]
        own_n = block_ids(tokens_n, documents_n, layout, block_size)
        first_n = first_blocks(layout.cu_seqlens, block_size)[documents_n]
        ids_N = torch.arange(block_bound(layout, block_size), device=rows_n.device)
        history_nN = (first_n.unsqueeze(1) <= ids_N) & (ids_N < own_n.unsqueeze(1))
        inside_nN = ids_N - first_n.unsqueeze(1)
        attended = [
            history_nN & rule.attends(own_n - first_n, inside_nN, block_size) if rule.block_size else history_nN
            for rule in self.rules
        ]
        # Sorting brings what is not attended to behind the rest: a fixed width, where picking the ids would wait for
        # the device.
        chosen_HnN = torch.where(torch.stack(attended), ids_N, len(ids_N)).sort(-1).values
        return SelectedBlocks(torch.where(chosen_HnN == len(ids_N), -1, chosen_HnN).int(), block_size)

    def describe_selection(self, selection: Selection, layout: Layout) -> Statistics:
        """The share of the keys that heads attend to: their mean, that of the shortest and of the longest span."""
        shares = [key_share(float(keys_T.sum()), layout) for keys_T in self._keys_of_rules(layout)]
        found = sorted((share.values["key_share"], share.weights["key_share"]) for share in shares if share.values)
        if not found:
            return Statistics()
        (shortest, weight), (longest, _) = found[0], found[-1]
        ends = {"shortest_key_share": shortest, "longest_key_share": longest}
        return joined([*shares, Statistics(ends, weight)])

    def _keys_of_rules(self, layout: Layout) -> Iterator[Tensor]:
        """For each rule, the keys that each of the layout's queries attends to, int64 [T]."""
        positions_T = layout.positions(layout.q_tokens, layout.q_documents)
        for rule in self.rules:
            if not rule.block_size:
                yield positions_T + 1
            else:
                (history_T,) = Spans((rule,)).history(positions_T // rule.block_size)
                yield history_T * rule.block_size + positions_T % rule.block_size + 1

    def attend(
        self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, layout: Layout, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """(out [T, H, D], lse [H, T]) over the given keys of the sinks and spans."""
        groups = self._head_groups(q_THD, k_SKD, layout)
        if len(groups) == 1:
            attention, chosen = self._local(groups[0], q_THD, layout)
            return attention.attend(q_THD, k_SKD, v_SKD, layout, chosen)
        tokens, heads, _ = q_THD.shape
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        lse_HT = torch.empty(heads, tokens, dtype=accumulation_dtype(q_THD.dtype), device=q_THD.device)
        for some in groups:
            q_ThD = q_THD[:, some.rows]
            attention, chosen = self._local(some, q_ThD, layout)
            k_SkD, v_SkD = k_SKD[:, some.kv_rows], v_SKD[:, some.kv_rows]
            out_THD[:, some.rows], lse_HT[some.rows] = attention.attend(q_ThD, k_SkD, v_SkD, layout, chosen)
        return out_THD, lse_HT

    def attend_backward(self, state: BackwardState, layout: Layout, selection: Selection) -> Gradients:
        """(dq, dk, dv) of `attend`; what several calls add to dk and dv is summed in float32 or float64."""
        groups = self._head_groups(state.q, state.k, layout)
        if len(groups) == 1:
            attention, chosen = self._local(groups[0], state.q, layout)
            return attention.attend_backward(state, layout, chosen)
        dq_THD = torch.empty(state.q.shape, dtype=state.q.dtype, device=state.q.device)
        # Only where a key/value head is in more than one group are gradients added, so that 16 bits would round each
        # part.
        several = sum(len(some.kv_heads) for some in groups) > state.k.shape[1]
        wide = accumulation_dtype(state.k.dtype) if several else state.k.dtype
        dk_SKD, dv_SKD = (torch.zeros_like(x, dtype=wide) for x in (state.k, state.v))
        for some in groups:
            part = some.part(state)
            attention, chosen = self._local(some, part.q, layout)
            dq_THD[:, some.rows], dk_SkD, dv_SkD = attention.attend_backward(part, layout, chosen)
            dk_SKD[:, some.kv_rows] += dk_SkD
            dv_SKD[:, some.kv_rows] += dv_SkD
        return dq_THD, dk_SKD.to(state.k.dtype), dv_SKD.to(state.v.dtype)

    def _head_groups(self, q_THD: Tensor, k_SKD: Tensor, layout: Layout) -> list["_HeadGroup"]:
        """The heads that one call of the kernels takes: few enough for the memory of their block ids."""
        tokens, heads, _ = q_THD.shape
        rules = self.rules * heads if self.options.heads is None else self.rules
        if len(rules) != heads:
            raise ValueError(f"attention.moa.alpha: given spans of {len(rules)} heads, but the layer has {heads}")
        # A layer's ids then take at most half of q's memory; the floor keeps short sequences from being cut into many
        # calls.
        most = max(q_THD.numel() * q_THD.element_size() // 2, _IDS_BYTES)
        groups: list[_HeadGroup] = []
        for group in _head_groups(rules, k_SKD.shape[1]):
            selected = group.spans.most_history(layout.max_seqlen) if group.spans.block_size else 0
            # Ids, and the entries of the lists that the kernels make of them.
            bytes_per_kv_head = 2 * 4 * tokens * selected * group.shared_by
            groups += group.cut(max(1, most // max(bytes_per_kv_head, 1)))
        return groups

    def _local(
        self, some: "_HeadGroup", q_ThD: Tensor, layout: Layout
    ) -> tuple[BlockAttention | FullAttention, Selection]:
        """The attention of these heads, and their selection."""
        spans = some.spans
        if not spans.block_size or (self.options.backend == "auto" and spans.hold(layout.max_seqlen)):
            return self.dense, ()
        blocks = BlockAttention(spans.block_size, self.scale, self.options.backend, "attention.moa.backend")
        return blocks, blocks.selection(history_blocks(spans, layout), q_ThD, layout, kv_heads=len(some.kv_heads))


def history_blocks(spans: Spans, layout: Layout) -> Tensor:
    """int32 [h, T, C]: the history blocks of each query, ids as in kernels/common/geometry.py, ascending, -1 behind."""
    size = spans.block_size
    first = first_blocks(layout.cu_seqlens, size)
    ids_N = torch.arange(block_bound(layout, size), device=first.device)
    # Ids behind the last block, up to the bound that needs no wait for the device, count to the last document.
    document_N = torch.searchsorted(first[1:], ids_N, right=True).clamp_(max=first.numel() - 2)
    first_N = first[document_N]
    starts_hN = spans.starts((ids_N - first_N).clamp(min=0))
    sinks_hN1 = spans.sinks(starts_hN).unsqueeze(-1)
    j_C = torch.arange(spans.most_history(layout.max_seqlen), device=first.device)
    inside_hNC = torch.where(j_C < sinks_hN1, j_C, starts_hN.unsqueeze(-1) - sinks_hN1 + j_C)
    chosen_hNC = inside_hNC + first_N.unsqueeze(-1)
    chosen_hNC = torch.where(chosen_hNC < ids_N.unsqueeze(-1), chosen_hNC, -1).int()
    # All queries of a block have the same list: it is made for each block and copied to its queries, B times less
    # arithmetic.
    return chosen_hNC.index_select(1, block_ids(layout.q_tokens, layout.q_documents, layout, size))


@dataclass(frozen=True)
class _HeadGroup:
    """Query heads with blocks of one size: those of each key/value head side by side, equally many of each."""

    spans: Spans
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def rows(self) -> slice | list[int]:
        """Index of the query heads."""
        return _as_index(self.heads)

    @property
    def kv_rows(self) -> slice | list[int]:
        """Index of the key/value heads."""
        return _as_index(self.kv_heads)

    @property
    def shared_by(self) -> int:
        """Query heads of a key/value head."""
        return len(self.heads) // len(self.kv_heads)

    def part(self, state: BackwardState) -> BackwardState:
        """The group's heads of `state`."""
        rows, kv_rows = self.rows, self.kv_rows
        queries = state.dout[:, rows], state.q[:, rows]
        keys = state.k[:, kv_rows], state.v[:, kv_rows]
        return BackwardState(*queries, *keys, state.out[:, rows], state.lse[rows].contiguous())

    def cut(self, most: int) -> Iterator["_HeadGroup"]:
        """Groups of at most this many key/value heads."""
        for first in range(0, len(self.kv_heads), most):
            kv_heads = self.kv_heads[first : first + most]
            where = slice(first * self.shared_by, (first + len(kv_heads)) * self.shared_by)
            yield _HeadGroup(Spans(self.spans.rules[where]), self.heads[where], kv_heads)


@functools.lru_cache(maxsize=1024)
def _head_groups(rules: tuple[SpanRule, ...], kv_heads: int) -> tuple[_HeadGroup, ...]:
    """The heads by the size of their blocks and the number of such heads that share a key/value head."""
    by_size: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for head, rule in enumerate(rules):
        by_size[rule.block_size][head * kv_heads // len(rules)].append(head)
    groups: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    # The block kernels take equally many query heads for each key/value head, so heads are grouped by that number as
    # well.
    for size, members in by_size.items():
        for kv_head, heads in members.items():
            groups[size, len(heads)][kv_head] = heads
    return tuple(
        _HeadGroup(Spans(tuple(rules[head] for head in heads)), heads, tuple(members))
        for members in groups.values()
        for heads in [tuple(head for some in members.values() for head in some)]
    )


def _as_index(heads: Sequence[int]) -> slice | list[int]:
    """A slice where the heads are neighbours, which needs no copy."""
    if all(after == before + 1 for before, after in pairwise(heads)):
        return slice(heads[0], heads[-1] + 1)
    return list(heads)


class MoaKind(AttentionKind):
    """Each head attends to the first tokens of the document and to a span of its own that ends with the query."""

    name = "moa"
    Options = SpanAttention.Options
    statistics = (
        SOFTMAX
        | KEY_SHARE
        | {"shortest_key_share": "that of the head with the shortest span", "longest_key_share": "with the longest"}
    )

    def __init__(self, options: SpanAttention.Options, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.spans = SpanAttention(options, head_dim)
        self.attentions = (self.spans,)

    @classmethod
    def problems(cls, options: SpanAttention.Options, context: StageContext) -> Iterator[str]:
        """Spans of another model, documents longer than the spans are for, tensor parallelism, a backend that cannot
        run."""
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
        shard = layer.engine.shard(layer.layout)
        q_nHd = own_rows(layer.rotate(layer.q_THd), shard)
        k_TKd = shard.gather("k", own_rows(layer.rotate(layer.k_TKd), shard))
        v_TKd = shard.gather("v", own_rows(layer.v_TKd, shard))
        attention = self.spans.dense if attends_to_all(shard) else self.spans
        out_nHd, _ = shard.attend(q_nHd, k_TKd, v_TKd, attention)
        return padded(out_nHd, len(layer.x_TD)), None

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        """The mean over the heads."""
        lengths_n = torch.tensor(list(lengths), dtype=torch.int64)
        rules = Counter(self.spans.rules)
        return sum(count * rule.attended_pairs(lengths_n) for rule, count in rules.items()) / rules.total()

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        """Keys and values are gathered."""
        gathered = 2 * batch.width * model.kv_heads * model.head_width
        return super().token_bytes(model, batch)._replace(gathered=gathered)


def _triton_refuses(options: SpanAttention.Options, context: StageContext) -> str:
    """Reason why the Triton kernels cannot attend in these spans; empty if they can."""
    reasons = (_rule_refuses(rule, context) for rule in set(options.rules()) if rule.block_size)
    return next(filter(None, reasons), "")


def _rule_refuses(rule: SpanRule, context: StageContext) -> str:
    selected = Spans((rule,)).most_history(context.seq_len)
    return triton_problem(context.device, context.model.head_width, rule.block_size, selected)
