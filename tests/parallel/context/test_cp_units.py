"""Units are summarized as a whole by their owner, wherever shards and documents end."""

from itertools import accumulate, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moba_train.parallel.context.layout import SequenceLayout
from moba_train.parallel.context.units import OwnedUnits


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], SequenceLayout, int]:
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) >= 6))
    ranks, size = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    sequence = SequenceLayout.split(sum(lengths), ranks, draw(st.sampled_from(["contiguous", "zigzag"])))
    return lengths, sequence, size


def units(lengths: list[int], size: int) -> list[range]:
    edges = [0, *accumulate(lengths)]
    return [
        range(begin, min(begin + size, stop)) for start, stop in pairwise(edges) for begin in range(start, stop, size)
    ]


@given(situations())
def test_the_rank_of_its_first_token_gets_the_whole_unit_and_only_missing_tokens_move(
    situation: tuple[list[int], SequenceLayout, int],
) -> None:
    lengths, sequence, size = situation
    owned = OwnedUnits.from_sequence(sequence, (0, *accumulate(lengths)), size)
    wanted: list[set[int]] = [set() for _ in sequence.ranges]
    missing: dict[int, Any] = {}
    for unit in units(lengths, size):
        owner = sequence.owner(unit[0])
        wanted[owner] |= set(unit)
        last = unit[0]
        for token in unit:  # tokens outside the range of the unit's first token
            if sequence.owner(token) != sequence.owner(last) or token in missing:
                missing |= {t: (sequence.owner(t), owner) for t in range(token, unit[-1] + 1)}
                break
            last = token
    assert [{t for start, stop in ranges for t in range(start, stop)} for ranges in owned.ranges] == wanted
    for ranges in owned.ranges:
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges)), f"not ascending: {ranges}"
    moved = {t: (move.source, move.target) for move in owned.moves for t in range(move.start, move.stop)}
    assert moved == missing


def test_aligned_shards_move_nothing() -> None:
    sequence = SequenceLayout.split(64, 4, "zigzag")
    assert OwnedUnits.from_sequence(sequence, (0, 64), 8).moves == ()
    assert OwnedUnits.from_sequence(sequence, (0, 16, 64), 8).moves == ()
    assert OwnedUnits.from_sequence(sequence, (0, 15, 64), 8).moves != ()
