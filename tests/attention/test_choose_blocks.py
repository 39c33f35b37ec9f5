"""Blocks chosen by score, against a loop."""

import pytest
import torch

from moba_train.attention.kernels.common.geometry import query_blocks
from moba_train.attention.kernels.common.selection import choose_blocks
from moba_train.attention.protocol import packed_layout


@pytest.mark.parametrize(("count", "first", "local"), [(3, 0, 1), (4, 1, 2), (2, 1, 3), (50, 2, 2)])
def test_the_best_history_blocks_and_the_forced_ones(count: int, first: int, local: int) -> None:
    lengths, size = [30, 0, 1, 19], 4
    layout = packed_layout(lengths)
    starts = [(document, token) for document, length in enumerate(lengths) for token in range(0, length, size)]
    queries = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    scores = torch.randn(2, len(queries), len(starts), generator=torch.Generator().manual_seed(0))
    scores[0, 25, 2] = -torch.inf
    chosen = choose_blocks(scores, query_blocks(layout, size), count, first=first, local=local)
    assert chosen.dtype == torch.int32
    for head in range(2):
        for row, (document, token) in enumerate(queries):
            own = starts.index((document, token // size * size))
            history = [block for block in range(own) if starts[block][0] == document]
            forced = [block for block in history if block < history[0] + first or block > own - local]
            free = [block for block in history if block not in forced and scores[head, row, block] > -torch.inf]
            free.sort(key=lambda block: float(-scores[head, row, block]))
            got = [block for block in chosen[head, row].tolist() if block >= 0]
            assert len(got) == min(count, len(forced) + len(free))
            assert got == sorted(got)
            if len(forced) <= count:
                assert got == sorted(forced + free[: count - len(forced)])
            else:
                assert set(got) <= set(forced)


def test_of_equal_scores_the_lower_block_wins() -> None:
    layout = packed_layout([40])
    scores = torch.tensor([0.5, 0.7, 0.5, 0.7, 0.5, 0.5, 0.0, 0.5, 0.9, 0.0]).expand(1, 40, 10)
    chosen = choose_blocks(scores, query_blocks(layout, 4), 4)
    assert chosen[0, 39].tolist() == [0, 1, 3, 8]
    assert chosen[0, 28].tolist() == [0, 1, 2, 3]
    assert chosen[0, 11].tolist() == [0, 1, -1, -1]
