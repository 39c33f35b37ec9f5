"""`head_reach` against a loop over queries and keys, in float64."""

import numpy as np
import pytest
import torch

from moba_train.data.samples import Sample
from moba_train.mechanisms.probes.head_reach import Budget, Look, _LayerReach
from moba_train.parallel.data_shard import DataShard

SIZE = 4
TOPK = 3


@pytest.mark.parametrize("count", [32, 30])
def test_probabilities_are_those_of_a_loop(count: int) -> None:
    """Two groups of two heads; the last block may be short."""
    generator = torch.Generator().manual_seed(0)
    q_nHD = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    k_SKD = torch.randn(count, 2, 8, generator=generator, dtype=torch.float64)
    tokens = [5, 17, 29]
    sources = [2, 3, 20]
    nothing = np.zeros(count)
    sample = Sample(nothing.astype(np.int64), nothing.astype(np.int64), nothing.astype(np.float32), [count], [])
    probe = _LayerReach(DataShard(), 4, 0.5, Budget(SIZE, TOPK))
    probe.look = Look(sample, tokens, sources)
    found = probe._added(q_nHD, k_SKD, torch.tensor(tokens))
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for group in range(2):
        for number, (token, source) in enumerate(zip(tokens, sources, strict=True)):
            p_GS = (q_nHD[number, 2 * group : 2 * group + 2] @ k_SKD[: token + 1, group].T * 0.5).softmax(-1)
            mass_N = [float(p_GS[:, first : first + SIZE].sum()) for first in range(0, token + 1, SIZE)]
            own = token // SIZE
            best = sorted(range(own), key=lambda block: -mass_N[block])[: TOPK - 1]
            inside = [key for key in range(token + 1) if key // SIZE in (own, *best)]
            near = [key for key in range(token + 1) if key > token - (TOPK - 1) * SIZE or key < SIZE]
            heads = slice(2 * group, 2 * group + 2)
            expected[0, heads] += 1
            expected[1, heads] += 1 - p_GS[:, inside].sum(-1)
            expected[2, heads] += 1 - p_GS[:, near].sum(-1)
            expected[3, heads] += p_GS[:, source]
    torch.testing.assert_close(found, expected)
