"""Decoding: one new query of each sequence against the keys and values of its tokens so far.

Shape suffixes: B sequences, R rows of the cache, S keys, H query heads, K key/value heads, D head width, U units.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moba_train.attention.layout import Layout, TokenRange, packed_layout


@dataclass(frozen=True)
class CachedKeys:
    """Keys and values of several sequences, each in a range of the cache's rows, with unused rows between them."""

    k_RKD: Tensor
    v_RKD: Tensor
    ranges: tuple[TokenRange, ...]
    """Rows of each sequence up to its newest token, that of the query; known on the host."""
    layout: Layout
    """The sequences packed one after the other, whose queries are their last tokens (`last_tokens`)."""
    summaries: Tensor | None
    """[U, K, ...]: summaries of the packed sequences' units, computed once each; zeros for incomplete units."""

    def packed_keys(self) -> Tensor:
        """The keys without unused rows, [S, K, D]: a view where there is one sequence, else a copy."""
        return self._packed(self.k_RKD)

    def packed_values(self) -> Tensor:
        """The values in the order of `packed_keys`."""
        return self._packed(self.v_RKD)

    def _packed(self, rows_RKD: Tensor) -> Tensor:
        parts = [rows_RKD[start:stop] for start, stop in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bounds(self) -> Tensor:
        """int64 [B, 2] on the cache's device: first row of each sequence and the row behind its last.

        Kept with the layout, as all layers share it.
        """
        device = self.k_RKD.device
        return self.layout.cached(
            ("cache rows", self.ranges), lambda: torch.tensor(self.ranges).to(device, non_blocking=True)
        )


def last_tokens(lengths: list[int], device: torch.device) -> Layout:
    """The layout of packed sequences of these lengths (tokens, >= 1), whose queries are their last tokens."""
    stops = torch.tensor(lengths).cumsum(0).tolist()
    queries = tuple(TokenRange(stop - 1, stop) for stop in stops)
    return packed_layout(lengths, device).part(queries, None)
