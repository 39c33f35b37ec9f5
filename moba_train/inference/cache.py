"""Key/value cache as an attention engine, so that the model's code knows nothing of caching.

Shape suffixes: T queries of this call, S cached keys, H query heads, K key/value heads, D head width.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout, LocalAttention, TokenRange, TokenRanges

Decode = Literal["full", "own"]
"""Attention of new tokens: full attention, as in the MoBA paper, or each layer's own attention kind."""


def check_decode(decode: str) -> None:
    """Raises ValueError, naming what is allowed, when `decode` is not a `Decode`."""
    if decode == "moba":
        raise ValueError("decode: 'moba' is called 'own' now")
    if decode not in get_args(Decode):
        raise ValueError(f"decode: {decode!r} given, allowed: {', '.join(get_args(Decode))}")


class CachedAttention:
    """Engine of one layer while one document is generated; holds the keys and values of all tokens so far.

    The first call prefills with the layer's own attention. Every later call takes one token, which attends to the cache
    with full attention or with the layer's own attention. An attention's summaries (MoBA: the mean keys of all complete
    blocks) are cached as well and computed anew when another `alignment` tokens are complete.
    """

    def __init__(self, capacity: int, decode: Decode) -> None:
        """capacity: tokens of prompt and answer together; decode: attention of every call after the first."""
        self.capacity = capacity
        self.decode = decode
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
        if self.decode == "full":
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
            self.k_SKD = k_TKD.new_empty(shape)
            self.v_SKD = v_TKD.new_empty(shape)
        end = self.length + k_TKD.shape[0]
        self.k_SKD[self.length : end] = k_TKD
        self.v_SKD[self.length : end] = v_TKD
        self.length = end
        return self.k_SKD[:end], self.v_SKD[:end]


def _one_document(length: int, device: torch.device, q_ranges: TokenRanges | None = None) -> Layout:
    return Layout(torch.tensor([0, length], dtype=torch.int32, device=device), length, length, q_ranges)
