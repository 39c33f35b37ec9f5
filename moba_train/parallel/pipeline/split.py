"""Which layers the ranks of a pipeline have.

The layers are cut into parts of consecutive ones, and part i is on rank i % pp: with as many parts as ranks, each rank
has one; with more of them (interleaved schedules), a rank has several that lie apart.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from moba_train.config.run import ParallelConfig
from moba_train.model.transformer import ModelPart

AUTO_INTERLEAVED = 2
"""Parts of each rank with `pp_schedule: interleaved_1f1b` and `pp_layers: auto`."""


def number_of_parts(parallel: ParallelConfig) -> int:
    """Into how many parts the layers are cut."""
    if parallel.pp_layers != "auto":
        return len(parallel.pp_layers)
    return parallel.pp * (AUTO_INTERLEAVED if parallel.pp_schedule == "interleaved_1f1b" else 1)


def balanced_split(costs: Sequence[float], output_cost: float, parts: int) -> tuple[int, ...]:
    """Number of layers in each of `parts` parts, at least one: the split whose most expensive part costs least.

    `costs`: of each layer, at least as many as parts; `output_cost`: of the output projection, which is in the last
    part. Among such splits it is the one whose costs have the smallest sum of squares.
    """
    layers = len(costs)
    before = [0.0, *accumulate(costs)]

    def cost(part: int, first: int, stop: int) -> float:
        return before[stop] - before[first] + (output_cost if part == parts - 1 else 0.0)

    def best(limit: float, combine: str) -> tuple[float, tuple[int, ...]]:
        """The least maximum (`combine` "max") or sum of squares of costs up to `limit`, and the counts of layers."""
        found: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
        for part in range(parts):
            ends: dict[int, tuple[float, tuple[int, ...]]] = {}
            for first, (value, counts) in found[-1].items():
                for stop in range(first + 1, layers - (parts - part - 1) + 1):
                    own = cost(part, first, stop)
                    if own > limit:
                        continue
                    total = max(value, own) if combine == "max" else value + own**2
                    if stop not in ends or total < ends[stop][0]:
                        ends[stop] = (total, (*counts, stop - first))
            found.append(ends)
        return found[-1][layers]

    least, _ = best(float("inf"), "max")
    return best(least * (1 + 1e-9), "squares")[1]


def model_parts(counts: Sequence[int]) -> list[ModelPart]:
    """The parts with these numbers of layers."""
    edges = [0, *accumulate(counts)]
    last = len(counts) - 1
    return [
        ModelPart(tuple(range(first, stop)), part == 0, part == last)
        for part, (first, stop) in enumerate(pairwise(edges))
    ]


def rank_part(parts: Sequence[ModelPart]) -> ModelPart:
    """What a rank has that has these parts."""
    layers = tuple(layer for part in parts for layer in part.layers)
    return ModelPart(layers, any(part.has_embedding for part in parts), any(part.has_output for part in parts))
