"""F20: MoBA and full attention in a mixture of experts, beside F14's dense models of as many active parameters.

The feed-forward of F14's model is 1,024 columns wide. Here each layer has 16 experts of 256 columns, of which a token
passes through 4: as many FLOPs, and four times as many weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.comparison import Verdict, compare
from experiments.corpus import Corpus
from experiments.figure import Arm, Finding, Result
from experiments.models import FULL, moba
from experiments.why_behind import Setting, WhyBehind, build_arm, trailing_cells
from experiments.with_window import with_trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

EXPERTS = {"experts": 16, "active": 4, "intermediate_size": 256}
QUICK_EXPERTS = {"experts": 4, "active": 2, "intermediate_size": 32}
ATTENTION: dict[str, dict[str, Any]] = {"full": FULL, "moba": moba(512, 3), "blocks128": moba(128, 12)}
QUICK_ATTENTION: dict[str, dict[str, Any]] = {"full": FULL, "moba": moba(64, 3)}
DENSE = ("long-full", "long-moba", "long-blocks128")
"""Arms of F14."""


class WithExperts(WhyBehind):
    """MoBA and full attention in a mixture of experts, beside dense models of as many active parameters."""

    name = "with-experts"
    title = "F20. MoBA in a mixture of experts"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Full attention first."""
        setting = Setting({}, {"moe": QUICK_EXPERTS if quick else EXPERTS})
        attention = QUICK_ATTENTION if quick else ATTENTION
        return [build_arm(f"experts-{arm}", seed, setting, kind, quick) for arm, kind in attention.items()]

    def prepare(self, corpus: Corpus, folder: Path, quick: bool) -> None:
        """Nothing: all arms read long documents."""

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses, beside those of F14's arms, whose setting is `long`."""
        known = with_trained(results, DENSE)
        return Finding(_verdicts(known), super().find(known).rows)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """The validation loss above that of full attention in a model of the same kind."""
        super().draw(with_trained(results, DENSE), canvas)


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Claims that were written down before the first arm was trained, but after those of F14."""
    comparison = compare(
        [
            cell._replace(arm=f"{setting}-{cell.arm}")
            for setting in ("experts", "long")
            for cell in trailing_cells(results, setting)
        ]
    )
    found = []
    for arm, words in (("full", "full attention"), ("moba", "MoBA 512/3")):
        claim = f"Experts lower the trailing loss with {words} by at least 0.02"
        found += comparison.judge(claim, {f"experts-{arm}": 1.0, f"long-{arm}": -1.0}, -math.inf, -0.02)
    gap = {"experts-moba": 1.0, "experts-full": -1.0}
    claim = "In a mixture of experts, MoBA 512/3 has a trailing loss at least 0.05 above that of full attention"
    found += comparison.judge(claim, gap, 0.05, math.inf)
    claim = "This distance is within 0.06 of that in the dense model"
    found += comparison.judge(claim, {**gap, "long-moba": -1.0, "long-full": 1.0}, -0.06, 0.06)
    claim = "In a mixture of experts, MoBA 128/12 has a lower trailing loss than MoBA 512/3"
    return found + comparison.judge(claim, {"experts-blocks128": 1.0, "experts-moba": -1.0}, -math.inf, 0.0)
