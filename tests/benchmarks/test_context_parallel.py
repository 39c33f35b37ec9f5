"""The comparison of results in the benchmark of context parallelism."""

import pytest
import torch

from benchmarks.context_parallel import Setting, differing_rows
from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.world import joined_world


def test_rows_that_differ_are_counted_in_the_order_of_the_sequence() -> None:
    results = tuple(torch.randn(50, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4))
    sequence = SequenceLayout.split(50, 1, "contiguous")
    with joined_world() as world:
        setting, first = Setting(world, repeats=1), list[torch.Tensor]()
        assert differing_rows(setting, results, sequence, first) == 0
        assert [x.shape for x in first] == [(50, 2)] * 4
        rounded = tuple(1.01 * x for x in results)
        assert differing_rows(setting, rounded, sequence, first) == 0
        results[2][7] *= 1.2
        results[2][9] = 0
        assert differing_rows(setting, results, sequence, first) == pytest.approx(2 / 50)
        results[1].copy_(results[1].roll(1, 0))
        assert differing_rows(setting, results, sequence, first) > 0.5
