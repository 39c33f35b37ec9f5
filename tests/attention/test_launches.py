"""How often MoBA's kernels and torch operators are launched, forward and backward: the host pays for every one."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from threading import Thread

import pytest
import torch

pytest.importorskip("triton")

from moba_train.attention.engine import LOCAL_ENGINE, OperatorEngine
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.operators import AcrossRanks
from moba_train.attention.protocol import BackwardState
from moba_train.parallel.context.engine import ContextParallel
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.launches import counted_launches, kernels_not_run
from tests.thread_ranks import thread_transports


@pytest.fixture(autouse=True)
def no_gpu_needed() -> Iterator[None]:
    with kernels_not_run():
        yield


def both(engine: OperatorEngine, block_size: int, topk: int, rows: int, layout: Layout) -> None:
    """Forward and backward with the heads of Llama-3-8B."""
    options = MobaAttention.Options(block_size=block_size, topk=topk, backend="triton")
    attention = MobaAttention(options, 128)
    q, k, v, dout = (torch.empty(rows, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8, 32))
    if isinstance(engine, AcrossRanks):
        out, lse, selection = engine.forward(q, k, v, attention, layout)
        engine.backward(BackwardState(dout, q, k, v, out, lse), selection, attention, layout)
        return
    selection = attention.select(q, attention.summarize(k, layout), layout)
    out, lse = attention.attend(q, k, v, layout, selection)
    attention.attend_backward(BackwardState(dout, q, k, v, out, lse), layout, selection)


@pytest.mark.parametrize(
    ("lengths", "block_size", "topk", "most"),
    [
        ([2**13], 512, 3, 20),
        ([2**15], 512, 3, 24),
        ([2**11] * 16, 512, 3, 24),
        ([2**15], 128, 8, 30),
        ([2**17], 512, 8, 61),
    ],
)
def test_launches_of_a_layer(lengths: list[int], block_size: int, topk: int, most: int) -> None:
    """In the second layer of a step: what follows from the layout alone is there."""
    layout = packed_layout(lengths, "meta")
    run = partial(both, LOCAL_ENGINE, block_size, topk, sum(lengths), layout)
    with counted_launches():
        run()
    with counted_launches() as counts:
        run()
    assert counts.total() <= most, counts


@pytest.mark.parametrize(("transport", "most"), [("allgather", 101), ("ulysses", 146), ("ring", 101)])
def test_launches_of_a_rank_with_16k_tokens(transport: str, most: int) -> None:
    strategy = CPStrategy(2, transport, "zigzag", 2)
    transports, _ = thread_transports(strategy)
    found: list[Counter[str]] = []

    def rank(number: int) -> None:
        layout = packed_layout([2**15], "meta")
        run = partial(both, ContextParallel(strategy, transports[number]), 512, 8, 2**14, layout)
        run()
        if number:
            run()
            return
        with counted_launches() as counts:
            run()
        found.append(counts)

    threads = [Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (counts,) = found
    assert counts.total() <= most, counts
