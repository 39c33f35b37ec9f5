"""Lists of numbers in short, for messages: layers, and ranks, of which there may be thousands."""

from collections.abc import Iterable


def number_ranges(numbers: Iterable[int]) -> str:
    """Distinct numbers in short: `0-28, 31`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def named_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short: `rank 3` or `ranks 3-9, 12`."""
    return _named("rank", ranks)


def named_layers(layers: Iterable[int]) -> str:
    """Layers in short: `layer 3` or `layers 0-28, 31`."""
    return _named("layer", layers)


def _named(noun: str, numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return f"{noun}{'s' * (len(listed) > 1)} {number_ranges(listed)}"
