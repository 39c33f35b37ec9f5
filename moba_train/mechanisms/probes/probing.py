"""Access to the queries, keys and values that layers attend with, on one device or over all ranks that share them."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor

from moba_train.attention.kind import Engine, EngineCall, WrappedEngine
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.attention.shard import ObservedShard, Shard, ShardCall, ShardObserver
from moba_train.model.transformer import Transformer
from moba_train.parallel.data_shard import DataShard


class _ProbedEngine(WrappedEngine):
    """Engine whose shards are also observed."""

    def __init__(self, engine: Engine, call: EngineCall, look: Callable[[ShardCall], None]) -> None:
        super().__init__(engine, call)
        self._look = look

    def shard(self, layout: Layout, /) -> Shard:
        """The engine's shard, observed."""
        return cast(Shard, ObservedShard(super().shard(layout), _GivenBlocks(self._look)))


class _GivenBlocks(ShardObserver):
    """Observer of attention to blocks that a kind gives."""

    def __init__(self, look: Callable[[ShardCall], None]) -> None:
        self._look = look

    def attending(self, call: ShardCall) -> AbstractContextManager[object]:
        """Call the function before the attention."""
        if call.selected_HnC is not None:
            self._look(call)
        return nullcontext()


@contextmanager
def probing(
    model: Transformer,
    layers: Container[int],
    look: Callable[..., None],
    look_at_shard: Callable[[int, ShardCall], None],
    shard: DataShard,
) -> Iterator[None]:
    """Call `look(layer, q, k, v, attention, layout)` before each engine call of these layers, and
    `look_at_shard(layer, call)` before each attention of a shard to blocks that its kind gives, inside the block."""
    engine: Engine = shard.engine or LOCAL_ENGINE

    def probed(layer: int) -> Engine:
        def run(
            q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout
        ) -> tuple[Tensor, Tensor]:
            look(layer, q_LHD, k_LKD, v_LKD, attention, layout)
            return engine(q_LHD, k_LKD, v_LKD, attention, layout)

        return _ProbedEngine(engine, run, partial(look_at_shard, layer))

    model.set_engines([probed(layer) if layer in layers else engine for layer in range(model.config.layers)])
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled again for other engines
            yield
    finally:
        model.set_engines([engine] * model.config.layers)


def gathered(
    q_LHD: Tensor, keys: Sequence[Tensor], tokens_n: Tensor, layout: Layout, shard: DataShard
) -> tuple[Tensor, list[Tensor]] | None:
    """Queries of `tokens_n`, [n, H, D], and `keys` (tensors with one row a token) of the whole sequence.

    None on all but the first of the ranks that share a sequence, which call it together.
    """
    if shard.engine is None:
        return q_LHD[tokens_n], list(keys)
    q_nHD = shard.engine.gather_tokens(q_LHD, tokens_n, layout.total)
    whole = [shard.engine.gather(x, layout.total) for x in keys]
    return None if shard.engine.rank else (q_nHD, whole)


def gathered_rows(x_nx: Tensor, tokens_n: Tensor, layout: Layout, shard: DataShard) -> Tensor:
    """Rows of `tokens_n` of a tensor that has one for each token of this rank's shard, without padding.

    Equal on all ranks that share a sequence, which call it together.
    """
    if shard.engine is None:
        return x_nx[tokens_n]
    rows = shard.engine.shard(layout.part(None, None))
    return shard.engine.gather_tokens(rows.padded(x_nx), tokens_n, layout.total)
