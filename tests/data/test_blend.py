"""The blend keeps the weights at every moment, and is the same however it is asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moba_train.data.blend import blend, samples_taken

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights=WEIGHTS, count=st.integers(0, 400))
def test_every_prefix_keeps_the_weights(weights: list[float], count: int) -> None:
    source, ordinal = blend(weights, count)
    share = np.array(weights) / sum(weights)
    drawn = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    ideal = np.arange(1, count + 1)[:, None] * share
    assert (np.abs(drawn - ideal) <= (1 + len(weights) * share) / 2 + 1e-6).all()
    # Each source's samples come in their order, none left out.
    for index in range(len(weights)):
        assert ordinal[source == index].tolist() == list(range((source == index).sum()))
    assert samples_taken(weights, count).tolist() == np.bincount(source, minlength=len(weights)).tolist()


@given(weights=WEIGHTS, first=st.integers(0, 300), count=st.integers(0, 100))
def test_any_range_is_a_part_of_the_longer_blend(weights: list[float], first: int, count: int) -> None:
    source, ordinal = blend(weights, first + count + 7)
    window = blend(weights, count, first)
    assert (window[0].dtype, window[1].dtype) == (np.int32, np.int64)
    assert window[0].tolist() == source[first : first + count].tolist()
    assert window[1].tolist() == ordinal[first : first + count].tolist()


def test_far_ranges_are_exact() -> None:
    weights, far = [0.7, 0.2, 0.1], 10**9
    source, ordinal = blend(weights, 1000, far)
    before, after = samples_taken(weights, far), samples_taken(weights, far + 1000)
    assert before.sum() == far
    assert after.tolist() == (before + np.bincount(source, minlength=3)).tolist()
    assert ordinal[source == 0][0] == before[0]
