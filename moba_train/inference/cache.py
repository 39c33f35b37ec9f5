"""Key/value cache, as an attention engine: the model itself never hears of caching.

Shape suffixes: T queries of this call, S cached keys, H query heads, K key/value heads, D head width.
"""

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout, LocalAttention, TokenRange, TokenRanges


class CachedAttention:
    """The engine of one layer while one document is generated: keys and values of all tokens so far.

    The first call prefills with the layer's own attention; later calls bring one token each and attend to the cache,
    with the layer's own attention (`sparse_decode`) or with full attention, as the MoBA paper does. What an attention
    needs to select (MoBA: the mean keys of all finished blocks) is cached too and renewed when another `alignment`
    tokens are complete.
    """

    def __init__(self, capacity: int, sparse_decode: bool) -> None:
        """`capacity`: tokens, prompt and answer together."""
        self.capacity, self.sparse_decode = capacity, sparse_decode
        self.length = 0
        self.k_SKD: Tensor | None = None
        self.v_SKD: Tensor | None = None
        self.summaries: Tensor | None = None
        self.summarized_blocks = -1

    def __call__(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, attention: LocalAttention, layout: Layout
    ) -> tuple[Tensor, Tensor]:
        """Append the new keys and values, and attend from the new queries. Returns out [T, H, D] and lse [H, T]."""
        first = self.length
        k_SKD, v_SKD = self._append(k_TKD, v_TKD)
        if first == 0:
            return LOCAL_ENGINE(q_THD, k_SKD, v_SKD, attention, _one_document(self.length, q_THD.device))
        if not self.sparse_decode:
            attention = FullAttention(FullAttention.Options(), q_THD.shape[-1])
        layout = _one_document(self.length, q_THD.device, (TokenRange(first, self.length),))
        if self.length // attention.alignment != self.summarized_blocks:
            self.summaries = attention.summarize(k_SKD, layout)
            self.summarized_blocks = self.length // attention.alignment
        selection = attention.select(q_THD, self.summaries, layout)
        return attention.attend(q_THD, k_SKD, v_SKD, layout, selection)

    def _append(self, k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
        if self.k_SKD is None or self.v_SKD is None:
            shape = (self.capacity, *k_TKD.shape[1:])
            self.k_SKD, self.v_SKD = k_TKD.new_empty(shape), v_TKD.new_empty(shape)
        end = self.length + k_TKD.shape[0]
        self.k_SKD[self.length : end], self.v_SKD[self.length : end] = k_TKD, v_TKD
        self.length = end
        return self.k_SKD[:end], self.v_SKD[:end]


def _one_document(length: int, device: torch.device, q_ranges: TokenRanges | None = None) -> Layout:
    return Layout(torch.tensor([0, length], dtype=torch.int32, device=device), length, length, q_ranges)
