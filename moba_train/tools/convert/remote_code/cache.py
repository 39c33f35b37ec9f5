"""Texts of a batch, and what a layer of a model trained by moba_train keeps of their tokens.

Shape suffixes: B texts, S all tokens, K key/value heads, d head width, N blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer, StaticLayer


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, softmax and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class Text(NamedTuple):
    """Texts of a batch with as much padding before them, which begin at token `first`."""

    rows: slice | list[int]
    first: int


Texts = list[Text]


class Kept:
    """Tensors that a kind of attention keeps of a layer's tokens. Cut and reordered as keys and values are."""

    keys: Tensor | None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pooled: Tensor | None = None
        """Mean key of each text's complete blocks, [B, K, N, d], counted from the text's first token."""
        self.rows: dict[str, Tensor] = {}
        """Other rows of all tokens, [B, heads, S, width], by name."""
        self.states: dict[str, Tensor] = {}
        """States of all tokens so far, [B, ...], by name."""
        self.parts: dict[str, KeptPart] = {}
        """Those of parts of the heads, by name."""

    def part(self, name: str) -> "KeptPart":
        """Tensors that a part of the heads keeps."""
        return self.parts.setdefault(name, KeptPart(self))

    def append(self, name: str, new: Tensor) -> Tensor:
        """The rows of all tokens, with the new ones."""
        self.rows[name] = torch.cat([self.rows[name], new], 2) if name in self.rows else new
        return self.rows[name]

    def mean_keys(self, call: Any, block_size: int) -> Tensor:
        """Mean keys of complete blocks, [B, K, N, d]; computed of those that the new tokens complete."""
        tokens = call.k.shape[2]
        new = call.q.shape[2]
        done = (tokens - new) // block_size
        complete = tokens // block_size
        if self.pooled is None:
            _, heads, _, width = call.k.shape
            self.pooled = call.k.new_zeros(self.texts(), heads, 0, width)
        missing = complete - self.pooled.shape[2]
        if missing > 0:
            self.pooled = F.pad(self.pooled, (0, 0, 0, missing))
        if complete > done:
            blocks = call.k[:, :, done * block_size : complete * block_size].detach()
            means = blocks.unflatten(2, (complete - done, block_size)).to(wide(blocks.dtype)).mean(3)
            self.pooled[call.text.rows, :, done:complete] = means.to(blocks.dtype)
        return self.pooled[call.text.rows, :, :complete]

    def state(self, name: str, text: Text) -> Tensor | None:
        """The state of some texts, None at their beginning."""
        return self.states[name][text.rows] if name in self.states else None

    def set_state(self, name: str, text: Text, state: Tensor) -> None:
        """Replace the state of some texts."""
        if name not in self.states:
            self.states[name] = state.new_zeros(self.texts(), *state.shape[1:])
        self.states[name] = self.states[name].index_copy(0, _indices(text, state), state)

    def texts(self) -> int:
        """Texts of the batch."""
        assert self.keys is not None  # `update` came before
        return len(self.keys)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {name: change(rows) for name, rows in self.rows.items()}
        self.states = {name: change(state) for name, state in self.states.items()}
        self.pooled = None if self.pooled is None else change(self.pooled)
        for part in self.parts.values():
            part._each(change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[misc]  # that of transformers' layer
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def crop(self, length: int) -> None:
        """Cut off the last -`length` tokens, or in earlier releases of transformers all but the first `length`."""
        if self.states:
            raise ValueError("cache: cannot be cut, because layers of this model keep a state of all tokens")
        self._crop(length)
        # Mean keys stay: those of blocks that are no longer complete are computed again once they are.
        for kept in (self, *self.parts.values()):
            kept.rows = {name: rows[:, :, : self.get_seq_length()] for name, rows in kept.rows.items()}

    def _crop(self, length: int) -> None:
        super().crop(length)  # type: ignore[misc]  # that of transformers' layer

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]  # that of transformers' layer
        self.pooled = None
        self.rows = {}
        self.states = {}
        self.parts = {}

    def get_seq_length(self) -> int:
        return int(super().get_seq_length())  # type: ignore[misc]  # that of transformers' layer


class KeptPart(Kept):
    """Tensors that a part of a layer's heads keeps. The layer has the keys and values."""

    def __init__(self, layer: Kept) -> None:
        super().__init__()
        self._layer = layer

    def get_seq_length(self) -> int:
        return self._layer.get_seq_length()

    def texts(self) -> int:
        return self._layer.texts()


def _indices(text: Text, like: Tensor) -> Tensor:
    rows = text.rows if isinstance(text.rows, list) else range(len(like))
    return torch.tensor([*rows], device=like.device)


class BlockCacheLayer(Kept, DynamicLayer):
    """A layer of a DynamicCache."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._each(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._each(lambda x: x[indices])


class StaticBlockCacheLayer(Kept, StaticLayer):
    """A layer of a StaticCache, whose room for keys and values is made at once.

    It counts its tokens itself: transformers 5.0 counts keys that are not zero, and later releases by a tensor.
    """

    is_compileable = False
    tokens = 0

    def update(self, keys: Tensor, values: Tensor, *_arguments: Any) -> tuple[Tensor, Tensor]:
        """All keys and values so far. Raises ValueError if there is no room for the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        end = self.tokens + keys.shape[2]
        if end > self.max_cache_len:
            raise ValueError(f"cache: {end} tokens given, allowed: {self.max_cache_len}")
        all_keys: Any = self.keys
        all_values: Any = self.values
        all_keys[:, :, self.tokens : end] = keys
        all_values[:, :, self.tokens : end] = values
        self.tokens = end
        return all_keys[:, :, :end], all_values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.tokens

    def _crop(self, length: int) -> None:
        self.tokens = length if length > 0 else self.tokens + length

    def reset(self) -> None:
        super().reset()
        self.tokens = 0
