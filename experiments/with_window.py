"""F19: MoBA with a window before the own block, beside a window and MoBA of as many keys, which F14 has trained.

In F14 a window and MoBA of blocks of 128 keys end with equal losses. Here the 12 blocks of a query are divided between
the two: the own block, a window before it, and blocks that the gate selects before the window.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.comparison import Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Finding, Result
from experiments.results import read_results
from experiments.why_behind import Setting, WhyBehind, build_arm, trailing_cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

BLOCK = 128
DIVISIONS = {384: 9, 768: 6, 1024: 4}
"""Window and topk: 12 blocks in all, the own one included, so exactly as many keys as MoBA 128/12."""
TRAINED = ("long-full", "long-blocks128", "long-window1472")
"""Arms of F14."""
_LONG = Setting({})
_RESULTS = Path(__file__).parent / "results" / f"{WhyBehind.name}.json"


class WithWindow(WhyBehind):
    """MoBA with a window before the own block, beside a window and MoBA of as many keys."""

    name = "with-window"
    title = "F19. MoBA with a window"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """An arm for each division of the keys."""
        divisions = {128: 2} if quick else DIVISIONS
        return [
            build_arm(f"long-moba_window{window}", seed, _LONG, _attention(window, topk, quick), quick)
            for window, topk in divisions.items()
        ]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Nothing: all arms read long documents."""

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses, beside those of F14's arms."""
        known = with_trained(results, TRAINED)
        return Finding(_verdicts(known), super().find(known).rows)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """The validation loss above full attention's."""
        super().draw(with_trained(results, TRAINED), canvas)


def _attention(window: int, topk: int, quick: bool) -> dict[str, Any]:
    sizes = {"block_size": 64 if quick else BLOCK, "topk": topk, "window": window}
    return {"default": "moba_window", "moba_window": sizes}


def with_trained(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """The results, behind those of F14's arms of these names, if these have the same model apart from experts."""
    models = [_without_experts(one) for one in results]
    return [
        *(one for one in read_results(_RESULTS) if one["name"] in names and _without_experts(one) in models),
        *results,
    ]


def _without_experts(result: Result) -> dict[str, Any]:
    return {key: value for key, value in result["recipe"]["model"].items() if key != "moe"}


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained, but after those of F14."""
    comparison = compare(trailing_cells(results, "long"))
    found = []
    for other, words in (("window1472", "a window of as many keys"), ("blocks128", "MoBA 128/12")):
        claim = f"A window of 768 and five selected blocks have a trailing loss at least 0.01 below that of {words}"
        found += comparison.judge(claim, {"moba_window768": 1.0, other: -1.0}, -math.inf, -0.01)
    claim = "With 1,024 keys of them in the window, it is within 0.01 of that with 384"
    return found + comparison.judge(claim, {"moba_window1024": 1.0, "moba_window384": -1.0}, -0.01, 0.01)
