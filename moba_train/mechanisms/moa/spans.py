"""Blocks that the queries of a head attend to: the sinks at the document's start, and a span that ends with their own.

A query in block b of its document (blocks of B tokens, counted from 0) has the span S = alpha + beta N, where
N = (b + 1) B is the length of the document up to the end of the query's block; it attends to ceil(S / B) blocks, its
own included and at least that, and to the sink blocks. So all queries of a block attend to the same blocks, whatever
follows: documents may be packed, and a document may grow while tokens are generated.

Shape suffixes: h some query heads, N block numbers inside a document, n documents.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_UNITS = 10**6
"""beta is a whole number of millionths, so that spans are computed in integers: exactly, and alike on every device."""
MOST_BLOCKS = 32
"""Blocks of a span, at most: longer spans get longer blocks. Block ids then take 4 x 32 bytes for each query and head,
the size of its vector at d = 64 in 16 bits."""
_LONGER = 4
"""Factor between the block sizes of heads, so that few calls serve all heads."""


@dataclass(frozen=True)
class SpanRule:
    """The span of one head."""

    alpha: int
    """Tokens."""
    beta: float
    """Share of the document's tokens so far, 0 to 1; rounded to millionths."""
    block_size: int
    """B, or 0: everything before the query is attended to."""
    sinks: int
    """Blocks at the start of the document."""

    @classmethod
    def fitted(cls, alpha: int, beta: float, *, block_size: int, sink_tokens: int, max_length: int) -> "SpanRule":
        """The rule whose blocks are `block_size` tokens, or 4, 16, ... times as long where the span of a document of
        `max_length` tokens would have more than 32 blocks. It has no blocks where that span holds the document."""
        alpha = max(alpha, -max_length)  # no span at all, either way
        longest = alpha * _UNITS + round(beta * _UNITS) * max_length
        if longest >= max_length * _UNITS:
            return cls(alpha, beta, 0, 0)
        while longest > MOST_BLOCKS * block_size * _UNITS:
            block_size *= _LONGER
        return cls(alpha, beta, block_size, -(-sink_tokens // block_size))

    def attended_pairs(self, lengths_n: Tensor) -> float:
        """Pairs of a query and a key in documents of these lengths, int64; a query's own key counts half."""
        if not self.block_size:
            return float((lengths_n.double() ** 2).sum()) / 2
        size = self.block_size
        blocks_n, rest_n = lengths_n // size, lengths_n % size
        blocks = int(blocks_n.max()) + 1 if lengths_n.numel() else 1
        history_N = Spans((self,)).history(torch.arange(blocks))[0].double()
        # A prefix sum over the blocks of the longest document serves all documents; in float64, which holds these
        # counts exactly up to 2**53 (in float32 they are rounded from 4K tokens on, at 2**24 pairs).
        before_N = torch.cat([history_N.new_zeros(1), history_N.cumsum(0)])
        own = (blocks_n * size**2 + rest_n**2).double() / 2
        return float((own + size**2 * before_N[blocks_n] + size * rest_n * history_N[blocks_n]).sum())

    def attends(self, own_n: Tensor, blocks_nN: Tensor, size: int) -> Tensor:
        """bool [n, N]: whether queries in block `own_n` attend to `blocks_nN` before it: numbers in their document, of
        blocks of `size` tokens, of which this rule's blocks are a multiple."""
        longer = self.block_size // size
        starts_n1 = Spans((self,)).starts(own_n // longer)[0].unsqueeze(1)
        return (blocks_nN >= starts_n1 * longer) | (blocks_nN < self.sinks * longer)


@dataclass(frozen=True)
class Spans:
    """The rules of several heads with blocks of one size."""

    rules: tuple[SpanRule, ...]

    @property
    def block_size(self) -> int:
        """B."""
        return self.rules[0].block_size

    def starts(self, own_N: Tensor) -> Tensor:
        """int64 [h, N]: the first block of the span of queries in block `own_N` of their document."""
        alpha_h1, beta_h1 = _on_device(self.rules, own_N.device)
        length_N = (own_N + 1) * self.block_size
        # Floor division of the negative rounds up.
        blocks_hN = -(-(alpha_h1 + beta_h1 * length_N) // (self.block_size * _UNITS))
        return (own_N + 1 - blocks_hN.clamp(min=1)).clamp(min=0)

    def sinks(self, starts_hN: Tensor) -> Tensor:
        """int64 [h, N]: sink blocks that lie before the span."""
        return starts_hN.clamp(max=self.rules[0].sinks)

    def history(self, own_N: Tensor) -> Tensor:
        """int64 [h, N]: blocks attended to, the query's own not counted."""
        starts_hN = self.starts(own_N)
        return own_N - starts_hN + self.sinks(starts_hN)

    def most_history(self, length: int) -> int:
        """`history` of the last block of a document of this many tokens: no block of it has more, as beta <= 1."""
        # Computed on the CPU from the layout's longest length, so that the width of the lists needs no wait for the
        # device.
        return int(self.history(self._last_block(length)).max())

    def hold(self, length: int) -> bool:
        """True if every query in a document of `length` tokens attends to everything before it."""
        last = self._last_block(length)
        return bool((self.history(last) == last).all())

    def _last_block(self, length: int) -> Tensor:
        return torch.tensor([max(-(-length // self.block_size) - 1, 0)])


@functools.lru_cache(maxsize=4096)
def _on_device(rules: tuple[SpanRule, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """alpha and beta in `_UNITS`, int64 [h, 1]."""
    values = torch.tensor([[rule.alpha * _UNITS, round(rule.beta * _UNITS)] for rule in rules], dtype=torch.int64)
    alpha_h1, beta_h1 = values.to(device).split(1, dim=1)
    return alpha_h1, beta_h1
