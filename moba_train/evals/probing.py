"""Looking at the queries, keys and values that layers attend with, on one device or over all ranks that share them."""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moba_train.attention.kind import Engine, WrappedEngine
from moba_train.attention.local import LOCAL_ENGINE
from moba_train.attention.protocol import Layout, LocalAttention
from moba_train.model.transformer import Transformer
from moba_train.parallel.stage import DataShard


@contextmanager
def probing(model: Transformer, layers: Container[int], look: Callable[..., None], shard: DataShard) -> Iterator[None]:
    """Inside, `look(layer, q, k, v, attention, layout)` is called before each attention call of these layers."""
    engine: Engine = shard.engine or LOCAL_ENGINE

    def probed(layer: int) -> Engine:
        def run(
            q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, attention: LocalAttention, layout: Layout
        ) -> tuple[Tensor, Tensor]:
            look(layer, q_LHD, k_LKD, v_LKD, attention, layout)
            return engine(q_LHD, k_LKD, v_LKD, attention, layout)

        return WrappedEngine(engine, run)

    model.set_engines([probed(layer) if layer in layers else engine for layer in range(model.config.layers)])
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled anew for other engines
            yield
    finally:
        model.set_engines([engine] * model.config.layers)


def gathered(
    q_LHD: Tensor, keys: Sequence[Tensor], tokens_n: Tensor, layout: Layout, shard: DataShard
) -> tuple[Tensor, list[Tensor]] | None:
    """The queries of `tokens_n`, [n, H, D], and `keys` (tensors of one row a token) of the whole sequence.

    None on ranks whose sequence another rank looks at. Called on all ranks that share a sequence together.
    """
    if shard.engine is None:
        return q_LHD[tokens_n], list(keys)
    q_nHD = shard.engine.gather_tokens(q_LHD, tokens_n, layout.total)
    whole = [shard.engine.gather(x, layout.total) for x in keys]
    return None if shard.engine.rank else (q_nHD, whole)
