"""F4: the size of MoBA's blocks, at constant sparsity and at a constant number of selected keys."""

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, GREEN, MOBA, band, powers_of_two, zero_line
from experiments import published
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, TOKENS_PER_PARAMETER, batch_tokens, moba, parameters, recipe
from experiments.readings import keys_text, validation_by_sequence, validation_loss

SIZE = "6m"
BLOCKS = (8, 16, 32, 64, 128)
"""Blocks in a sequence, a quarter of which is selected."""
FIXED_KEYS = {512: 3, 256: 6, 128: 12}
"""Blocks selected, own one included, by block size: 1,536 keys."""
_COARSEST_KEYS = "keys-512-conv-0"
_COLOURS = {0: MOBA, 3: BLUE}


class Granularity(Figure):
    """Blocks of different sizes at constant sparsity, and at a constant number of keys with and without `key_conv`."""

    name = "granularity"
    title = "F4. Block granularity"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The coarsest, the finest and full attention first."""
        if quick:
            shape = ("small", 256, 8192, 2048, {"sequences": 4})
            return [
                _arm("full-32k", seed, FULL, shape),
                _arm("blocks-4", seed, moba(64, 2), shape),
                _arm("blocks-16", seed, moba(16, 8), shape),
                _arm("keys-32-conv-3", seed, moba(32, 2, key_conv=3), shape),
            ]
        tokens = TOKENS_PER_PARAMETER * parameters(SIZE)
        long = (SIZE, 32_768, tokens, batch_tokens(32_768), {"sequences": 64})
        short = (SIZE, 8192, tokens, batch_tokens(8192), {"sequences": 256})
        order = sorted(BLOCKS, key=lambda count: (count not in (BLOCKS[0], BLOCKS[-1]), count))
        found = [_arm("full-32k", seed, FULL, long)]
        found += [_arm(f"blocks-{count}", seed, moba(32_768 // count, count // 4), long) for count in order]
        for block_size, topk in FIXED_KEYS.items():
            for width in (0, 3):
                kind = moba(block_size, topk, key_conv=width)
                found.append(_arm(f"keys-{block_size}-conv-{width}", seed, kind, short))
        return found

    def find(self, results: Sequence[Result]) -> Finding:
        """Means of the arms, and the differences that were published."""
        rows = [["arm", "mean keys", "validation loss", *ABOVE, "seeds"]]
        at_32k = _cells(results, ("blocks-", "full-32k"))
        for name, values in _values(results).items():
            gap = above(at_32k, name, "full-32k")
            (some, *_) = (result for result in results if result["name"] == name)
            rows.append([name, keys_text(some), f"{statistics.mean(values):.4f}", *gap, str(len(values))])
        return Finding([*_sparsity_verdicts(results), *_key_verdicts(results)], rows)

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Left: constant sparsity, as the distance from full attention, beside the published. Right: constant keys, as
        the distance from blocks of 512 without a convolution; seeds are further apart than arms. Bands over seeds."""
        left, right = canvas.subplots(1, 2)
        by_seed: dict[int, dict[str, float]] = {}
        for result in results:
            by_seed.setdefault(result["seed"], {})[result["name"]] = validation_loss(result)
        _draw_sparsity(left, [losses for losses in by_seed.values() if "full-32k" in losses])
        for width, colour in _COLOURS.items():
            label = f"key_conv: {width}" if width else "no convolution"
            arms = {size: f"keys-{size}-conv-{width}" for size in FIXED_KEYS}
            known = [one for one in by_seed.values() if {_COARSEST_KEYS, *arms.values()} <= one.keys()]
            if known:
                gaps = [[one[arm] - one[_COARSEST_KEYS] for arm in arms.values()] for one in known]
                band(right, list(arms), gaps, colour, label, marker="o")
        zero_line(right)
        powers_of_two(right, list(FIXED_KEYS))
        right.set_xlabel("block size; a query sees 1,536 of 8K keys")
        right.set_ylabel("above 512, no convolution, nats")
        for axes, place in ((left, "lower left"), (right, "lower right")):
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc=place)


def _arm(
    name: str, seed: int, attention: Mapping[str, object], shape: tuple[str, int, int, int, Mapping[str, int]]
) -> Arm:
    size, seq_len, tokens, batch, evaluation = shape
    made = recipe(size, attention, seq_len, tokens, batch, evaluation)
    for short in made["stages"][:-1]:
        short["attention"] = FULL  # which all these selections are there; some blocks are longer than its sequences
    return Arm(name, seed, made)


def _values(results: Sequence[Result]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for result in results:
        found.setdefault(result["name"], []).append(validation_loss(result))
    return found


def _cells(results: Sequence[Result], prefixes: tuple[str, ...]) -> list[Cell]:
    """Arms whose names begin so, in blocks of a seed."""
    return [
        Cell(result["name"], f"seed {result['seed']}", validation_loss(result), validation_by_sequence(result))
        for result in results
        if result["name"].startswith(prefixes)
    ]


def _sparsity_verdicts(results: Sequence[Result]) -> list[Verdict]:
    comparison = compare(_cells(results, ("blocks-", "full-32k")))
    counts = sorted(int(arm.removeprefix("blocks-")) for arm in comparison.arms if arm != "full-32k")
    if not counts:
        return []
    coarsest, finest = f"blocks-{counts[0]}", f"blocks-{counts[-1]}"
    found = []
    if len(counts) > 1:
        claim = f"{counts[0]} blocks lose 0.005 or more to {counts[-1]}, at equal sparsity"
        found += comparison.judge(claim, {coarsest: 1.0, finest: -1.0}, 0.005, math.inf)
    claim = f"{counts[-1]} blocks are within 0.005 of full attention"
    return found + comparison.judge(claim, {finest: 1.0, "full-32k": -1.0}, -0.005, 0.005)


def _key_verdicts(results: Sequence[Result]) -> list[Verdict]:
    comparison = compare(_cells(results, ("keys-",)))
    claim = "Blocks of 128 are better than blocks of 512, at 1,536 keys"
    found = comparison.judge(claim, {"keys-128-conv-0": 1.0, "keys-512-conv-0": -1.0}, -math.inf, 0.0)
    pairs = [{f"keys-{size}-conv-3": 1.0, f"keys-{size}-conv-0": -1.0} for size in FIXED_KEYS]
    known = [pair for pair in pairs if comparison.knows(pair)]
    if known:
        weights = {arm: weight / len(known) for pair in known for arm, weight in pair.items()}
        claim = "A convolution over keys of width 3 improves the loss, mean over block sizes"
        found += comparison.judge(claim, weights, -math.inf, 0.0)
    return found


def _draw_sparsity(axes: Axes, by_seed: Sequence[Mapping[str, float]]) -> None:
    """by_seed: losses by arm, full attention among them."""
    counts = [count for count in BLOCKS if by_seed and all(f"blocks-{count}" in losses for losses in by_seed)]
    gaps = [[losses[f"blocks-{count}"] - losses["full-32k"] for count in counts] for losses in by_seed]
    if counts:
        band(axes, counts, gaps, MOBA, "here, band over seeds", marker="o")
    theirs = [loss - published.GRANULARITY_FULL for loss in published.GRANULARITY_LOSS.values()]
    axes.plot(list(published.GRANULARITY_LOSS), theirs, "s--", color=GREEN, label="published, 1.5B parameters")
    zero_line(axes)
    powers_of_two(axes, list(BLOCKS))
    axes.set_xlabel("blocks of 32K tokens, a quarter selected")
    axes.set_ylabel("validation loss above full")
