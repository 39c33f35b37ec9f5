"""Generation of one text whose keys and values are spread over the ranks of context parallelism.

The ranks read the prompt together, in one pass, as in training. Each keeps the keys and values of its own units (MoBA's
blocks), and the rank with the newest unit takes those of new tokens. All ranks compute a new token: each attends to the
keys that it holds, and the partial results are merged by online softmax. Summaries of all units are on every rank, so
that all select what one device would. A token's launches are not recorded as a CUDA graph: its messages run on a stream
of their own, and that a graph repeats them has not been tried.

Shape suffixes: L rows of a shard, U rows of a rank's own units, S keys that this rank holds, R ranks, H query heads,
K key/value heads, D head width, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.kernels.common.merge import nothing_seen, with_sink
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout, TokenRange, TokenRanges, packed_layout
from moba_train.attention.protocol import LocalAttention
from moba_train.attention.shard import Shard, padded
from moba_train.model.block import Block
from moba_train.model.build import attention_of_new_tokens
from moba_train.model.transformer import Transformer
from moba_train.parallel.activations import FEED_FORWARD_ROWS
from moba_train.parallel.context.comm import Communicator
from moba_train.parallel.context.engine import ContextParallel, context_engine
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.base import ShardedCall
from moba_train.parallel.context.units import owned_units, rows_of_own_units, summaries_of_own_units
from moba_train.parallel.world import World
from moba_train.tools.inference.cache import Decode
from moba_train.tools.inference.generate import Sampling, check_generation, sample


class PromptRanks(NamedTuple):
    """The ranks that share a prompt; each has the whole model."""

    engine: ContextParallel
    """Runs the attention of the prompt."""
    communicator: Communicator
    """Communication among all of them."""


def prompt_ranks(strategy: CPStrategy, world: World) -> PromptRanks:
    """All ranks of the world, called on all together. Raises ValueError, naming the YAML key, for an impossible
    strategy."""
    group = dist.group.WORLD
    assert group is not None
    engine = context_engine(strategy, group, world.device, world.timeout)
    return PromptRanks(engine, Communicator(group, world.device))


@torch.no_grad()
def generate_across_ranks(
    ranks: PromptRanks,
    model: Transformer,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    stop_tokens: Collection[int] = (),
    decode: Decode = "full",
    on_prefill: Callable[[int], object] = lambda _tokens: None,
    **sampling: Any,
) -> Iterator[int]:
    """Yield the token ids that `generate` would, on all ranks together, which give equal arguments.

    `sampling`: the fields of `Sampling`. Raises ValueError as `generate`, as `check_kinds`, and for a prompt with fewer
    tokens than ranks.
    """
    rules = Sampling(**sampling)
    check_generation(model, [prompt], rules, decode)
    check_kinds(model.attention_kinds())
    if len(prompt) < (count := ranks.communicator.size):
        raise ValueError(f"ranks (--gpus): given {count} for a prompt of {len(prompt)} tokens; allowed: one per token")
    generator = torch.Generator(model.embedding.weight.device).manual_seed(rules.seed)
    spread = SpreadSequence(ranks, len(prompt), max_new_tokens, model.embedding.weight.device)
    model.set_engines([SpreadAttention(spread, decode, kind) for kind in model.attention_kinds()])
    try:
        logits_V = spread.read(model, prompt)
        on_prefill(len(prompt))
        for step in range(max_new_tokens):
            token = spread.agreed(partial(sample, logits_V, rules, generator))
            if token in stop_tokens:
                return
            yield token
            if step < max_new_tokens - 1:
                logits_V = spread.next(model, token)
    finally:
        model.set_engines([LOCAL_ENGINE] * len(model.blocks))


def check_kinds(kinds: Iterable[AttentionKind]) -> None:
    """Raises ValueError for kinds whose layers need the rows of all ranks, or whose results over parts of the keys do
    not merge."""
    for kind in kinds:
        if not kind.facts.takes_sink:
            raise ValueError(_refused(kind.name))
        for attention in kind.attentions:
            if not attention.facts.merges:
                raise ValueError(
                    f"attention: given kind {kind.name} with several ranks (--gpus), whose results over the keys of "
                    "each rank do not merge; allowed: one rank"
                )


def _refused(kind: str) -> str:
    return (
        f"attention: given kind {kind} with several ranks (--gpus), whose layers gather more than keys and values; "
        "allowed: one rank, or kinds of one attention call: full, window, capped, and without key_conv moba, moba_v1 "
        "and moba_window"
    )


class SpreadSequence:
    """A sequence whose keys ranks share, and the tokens of the model's next call."""

    def __init__(self, ranks: PromptRanks, tokens: int, new_tokens: int, device: torch.device) -> None:
        """tokens: of the prompt, one for each rank or more."""
        self.engine, self.communicator = ranks
        self.prompt = self.engine.sequence(tokens)
        self.new_tokens = new_tokens
        self.length = tokens
        self.layout = packed_layout([tokens], device)
        """The sequence up to its newest tokens, which are the queries."""
        self._device = device
        self._has_last = self.prompt.owner(tokens - 1) == self.engine.rank

    def read(self, model: Transformer, prompt: Sequence[int]) -> Tensor:
        """Logits [V] behind the prompt on the rank with its last token, and of another token on the others."""
        for block in model.blocks:  # the whole shard is read in one pass
            cast(Block, block).feed_forward_rows = FEED_FORWARD_ROWS
        rank = self.engine.rank
        tokens_L, positions_L = (
            self.prompt.shard(x_T, rank).to(self._device) for x_T in (torch.tensor(prompt), torch.arange(len(prompt)))
        )
        row = self.prompt.local_rows(torch.tensor([len(prompt) - 1]), rank).clamp(min=0).to(self._device)
        logits_1V: Tensor = model(tokens_L, positions_L, self.layout, rows_n=row)
        return logits_1V[0]

    def next(self, model: Transformer, token: int) -> Tensor:
        """Logits [V] behind the new token."""
        position = torch.tensor([self.length], device=self._device)
        self.length += 1
        self.layout = last_tokens([self.length], self._device)
        logits_1V: Tensor = model(torch.tensor([token], device=self._device), position, self.layout)
        return logits_1V[0]

    def agreed(self, draw: Callable[[], int]) -> int:
        """The token that the rank with the prompt's last token draws, on all ranks."""
        token_1 = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._has_last:
            token_1[0] = draw()
        self.communicator.all_reduce(token_1)
        return int(token_1)

    def merged(self, out_1HD: Tensor, lse_H1: Tensor) -> tuple[Tensor, Tensor]:
        """(out [1, H, D], lse [H, 1]) over the keys of all ranks, from those over each rank's, by one message."""
        both_1HE = torch.cat([out_1HD.to(lse_H1.dtype), lse_H1.T.unsqueeze(-1)], -1)
        (both_RHE,) = self.communicator.all_gather(both_1HE).wait()
        lse_RH = both_RHE[..., -1]
        lse_H = lse_RH.logsumexp(0)  # finite: a rank has the query's own key
        out_HD = ((lse_RH - lse_H).exp().unsqueeze(-1) * both_RHE[..., :-1]).sum(0)
        return out_HD.unsqueeze(0).to(out_1HD.dtype), lse_H.unsqueeze(1)


@dataclass
class _Held:
    """Keys and values that this rank holds of one attention of one layer, and summaries of all ranks' units."""

    k_SKD: Tensor
    v_SKD: Tensor
    ranges: TokenRanges
    """Tokens of the keys; rows behind these are for new ones."""
    summaries: Tensor | None
    """One row for each unit that the text may get; zeros for units that are not complete."""

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class SpreadAttention(Engine):
    """Engine of one layer while a text is generated by several ranks: `CachedAttention` with the keys of one rank."""

    def __init__(self, spread: SpreadSequence, decode: Decode, kind: AttentionKind) -> None:
        """spread: shared by all layers; decode: attention of new tokens; kind: the layer's."""
        self._spread = spread
        self._full = attention_of_new_tokens(kind) if decode == "full" else None
        self._kind = kind
        self._held: dict[LocalAttention, _Held] = {}

    def __call__(
        self, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout, *sink: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of this rank's shard of the prompt or, in later calls, of a new token, [1, H, D] on all ranks."""
        held = self._held.get(attention)
        if held is None:
            result = self._spread.engine(q_LHD, k_LKD, v_LKD, attention, layout, *sink)
            self._held[attention] = self._kept(k_LKD, v_LKD, attention)
            return result
        self._append(held, k_LKD, v_LKD, attention)
        return with_sink(*self._spread.merged(*self._attend(held, q_LHD, attention)), *sink)

    def shard(self, layout: Layout) -> Shard:
        """Refused with ValueError: a kind that gathers rows of its own would need those of all ranks for each token."""
        raise ValueError(_refused(self._kind.name))

    def _kept(self, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention) -> _Held:
        """The keys and values of this rank's own units of the prompt, with room for new tokens on the last one's rank,
        and the summaries of all units that are complete."""
        spread = self._spread
        call = ShardedCall(attention, spread.layout, spread.prompt)
        alignment = attention.facts.alignment
        units = owned_units(spread.layout, spread.prompt, alignment)
        k_UKD, v_UKD = (rows_of_own_units(x, units, spread.prompt, spread.communicator) for x in (k_LKD, v_LKD))
        summaries = summaries_of_own_units(k_UKD, units, call, spread.communicator)
        if summaries is not None:
            most = (spread.length + spread.new_tokens) // alignment + 1
            summaries = padded(summaries[: spread.length // alignment], most)
        ranges = units.ranges[spread.engine.rank]
        room = spread.new_tokens if ranges and ranges[-1].stop == spread.length else 0
        k_SKD, v_SKD = (torch.cat([x, x.new_empty(room, *x.shape[1:])]) for x in (k_UKD, v_UKD))
        return _Held(k_SKD, v_SKD, ranges, summaries)

    def _append(self, held: _Held, k_1KD: Tensor, v_1KD: Tensor, attention: LocalAttention) -> None:
        """Take the new token's key and value, if the one before is here, and the summary of a unit that it completes.

        Its rank sends a unit's summary to the others, whose message is zeros."""
        length, alignment = self._spread.length, attention.facts.alignment
        is_here = bool(held.ranges) and held.ranges[-1].stop == length - 1
        if is_here:
            row = held.tokens
            held.k_SKD[row], held.v_SKD[row] = k_1KD[0], v_1KD[0]
            held.ranges = (*held.ranges[:-1], TokenRange(held.ranges[-1].start, length))
        if held.summaries is None or length % alignment:
            return
        summary = torch.zeros_like(held.summaries[:1])
        if is_here:
            k_BKD = held.k_SKD[: held.tokens][-alignment:]
            found = attention.summarize(k_BKD, packed_layout([alignment], k_BKD.device))
            assert found is not None
            summary.copy_(found[:1])
        self._spread.communicator.all_reduce(summary)
        held.summaries[length // alignment - 1] = summary[0]

    def _attend(self, held: _Held, q_1HD: Tensor, attention: LocalAttention) -> tuple[Tensor, Tensor]:
        """(out [1, H, D], lse [H, 1]) of the new token over the keys that this rank holds."""
        layout, tokens = self._spread.layout, held.tokens
        if not tokens:
            return nothing_seen(q_1HD)
        attention = self._full or attention
        if type(attention) is FullAttention:
            # All of them come before the query, or are its own: a sequence of their own, whatever lies between.
            own = layout.cached(("own keys", tokens), lambda: last_tokens([tokens], q_1HD.device))
            cached = CachedKeys(held.k_SKD, held.v_SKD, (TokenRange(0, tokens),), own, None)
            return attention.decode(q_1HD, cached)
        summaries = held.summaries
        if summaries is not None:
            summaries = summaries[: layout.total // attention.facts.alignment + 1]
        selection = attention.select(q_1HD, summaries, layout)
        part = layout.part(layout.q_ranges, held.ranges)
        return attention.attend(q_1HD, held.k_SKD[:tokens], held.v_SKD[:tokens], part, selection)
