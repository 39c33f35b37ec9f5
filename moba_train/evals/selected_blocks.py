"""How often the layers' heads select the blocks that hold what is asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moba_train.attention.blocks.geometry import block_ids
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.observer import AttentionObserver
from moba_train.attention.protocol import Layout, LocalAttention, Selection
from moba_train.evals.evaluation import EvaluationContext


class SelectedBlocks(AttentionObserver):
    """Counts, layer by layer, the heads whose query for a token of the answer may attend to the token to copy.

    Every rank counts its own queries and heads; `shares` adds them up.
    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self._layer = 0
        self._queries_n = torch.zeros(0, dtype=torch.int64, device=device)
        self._sources_n = self._queries_n
        self._counts = torch.zeros(layers, 2, dtype=torch.float64, device=device)

    def watch(self, places: Sequence[int], sources: Sequence[int]) -> None:
        """From now on, count for the queries that predict the tokens at `places`, each the copy of one of `sources`.

        Without places, count nothing.
        """
        device = self._counts.device
        self._queries_n = torch.tensor(places, dtype=torch.int64, device=device) - 1
        self._sources_n = torch.tensor(sources[: len(places)], dtype=torch.int64, device=device)

    def selected(self, attention: LocalAttention, selection: Selection, layout: Layout) -> None:
        """Count the watched queries that are among the layout's."""
        q_tokens_T = layout.q_tokens
        row_n = torch.searchsorted(q_tokens_T, self._queries_n).clamp_(max=len(q_tokens_T) - 1)
        here_n = q_tokens_T[row_n] == self._queries_n
        selected_HnC = attention.selected_by(row_n[here_n], selection, layout)
        if selected_HnC is None:
            return
        queries_n, sources_n = self._queries_n[here_n], self._sources_n[here_n]
        own_n, block_n = (
            block_ids(tokens_n, layout.documents(tokens_n), layout, attention.block_size)
            for tokens_n in (queries_n, sources_n)
        )
        selected_Hn = (selected_HnC == block_n[None, :, None]).any(-1) | (own_n == block_n)
        self._counts[self._layer, 0] += selected_Hn.sum()
        self._counts[self._layer, 1] += selected_Hn.numel()

    def shares(self) -> list[float | None]:
        """For each layer, the share of heads and queries; None where a layer attends to everything.

        Called on all ranks together.
        """
        dist.all_reduce(self._counts)
        return [found / asked if asked else None for found, asked in self._counts.tolist()]

    @contextmanager
    def observing(self, context: EvaluationContext) -> Iterator["SelectedBlocks"]:
        """Inside, this sees the attention of the context's model."""
        hooks = [
            # On blocks, not inside: torch.compile compiles their forward functions alone.
            block.register_forward_pre_hook(lambda _module, _inputs, layer=layer: self._enter(layer))
            for layer, block in zip(context.model.part.layers, context.model.blocks, strict=True)
        ]
        try:
            with (context.data_shard.engine or LOCAL_ENGINE).observe(self):
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, layer: int) -> None:
        self._layer = layer
