"""F9: models trained with full attention and with MoBA, each run with both."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.plotting import GREY, titled
from experiments.comparison import Cell, Verdict, compare
from experiments.figure import Figure, Finding, Result
from experiments.fits import COLOURS, attention_and_size
from experiments.trailing import BOTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

TRAINED = {"full": "trained with full", "moba": "trained with MoBA"}
LOSSES = {"validation": "validation loss", "trailing": "trailing loss"}


class TrainedWith(Figure):
    """Full attention and MoBA trained, each evaluated with both, on the models of `trailing`."""

    name = "trained-with"
    source = "trailing"
    title = "F9. Train with, run with"
    claim = (
        "Run with sparse attention, a 1B model trained with sparse attention has the lower perplexity, because "
        "training and running match; but training with sparse attention alone does not reach what full attention does "
        "([SSA](https://arxiv.org/abs/2511.20102), abstract and figure 1)."
    )
    setup = (
        "The models of F2, all sizes, at 32K and 95 % sparsity: every checkpoint is evaluated with both attentions on "
        "the same weights. The published models are 70 to 230 times as large."
    )
    result: ClassVar[str] = "one seed, no verdict"
    found: ClassVar[tuple[str, ...]] = (
        "One seed, and the three sizes that were trained with both contradict each other: run with MoBA, the model of "
        "4M that was trained with it is 0.17 nats ahead in validation loss, those of 6M and 10M are level (0.00 and "
        "0.01 behind); in the last 2K tokens it is 0.12 ahead, 0.02 and 0.04 behind.",
        "Run with full attention, the model of 4M that was trained with MoBA is ahead in both losses (0.10 and 0.05), "
        "those of 6M and 10M are behind.",
        "All seven models have the lower loss when they are run with full attention. In the last 2K tokens the four "
        "that were trained with MoBA gain 0.04 to 0.14 nats by it, the three that were trained with full attention "
        "0.21 to 0.27.",
    )

    def find(self, results: Sequence[Result]) -> Finding:
        """Means over seeds by size, and the crossover over all of them."""
        rows = [
            ["trained with, size", *(f"{loss}, run with {run}" for loss in LOSSES.values() for run in ("full", "MoBA"))]
        ]
        for name in dict.fromkeys(result["name"] for result in results):
            own = [result for result in results if result["name"] == name]
            cells = []
            for loss in LOSSES:
                for run in ("full", "moba"):
                    cells.append(f"{sum(evaluated(result, loss, run) for result in own) / len(own):.4f}")
            rows.append([name, *cells])
        verdicts = []
        for loss, label in LOSSES.items():
            verdicts += _verdicts(results, loss, label)
        return Finding(verdicts, rows)

    def draw(self, results: Sequence[Result], canvas: "Canvas") -> None:
        """What running with MoBA costs, and what training with it costs when run with full attention."""
        panels = canvas.subplots(1, 2, sharey=True)
        sizes = list(dict.fromkeys(attention_and_size(result["name"])[1] for result in results))
        for axes, (loss, label) in zip(panels, LOSSES.items(), strict=True):
            for trained, name in TRAINED.items():
                own = [result for result in results if attention_and_size(result["name"])[0] == trained]
                for run, style in (("full", "o"), ("moba", "^")):
                    x = [sizes.index(attention_and_size(result["name"])[1]) for result in own]
                    y = [evaluated(result, loss, run) for result in own]
                    axes.plot(x, y, style, ms=5, color=COLOURS[trained], alpha=0.8, label=f"{name}, run with {run}")
            axes.set_xticks(range(len(sizes)), sizes)
            titled(axes, label)
        panels[0].legend(frameon=False, labelcolor=GREY, fontsize=8)


def evaluated(result: Result, loss: str, run: str) -> float:
    """Validation or trailing loss of an arm's last checkpoint, run with full attention or with MoBA."""
    found = result["evaluations"][BOTH]
    if loss == "validation":
        return float(found["validation_loss"][run])
    return float(found["position_wise"]["curves"][run]["mean"][-1])


def _verdicts(results: Sequence[Result], loss: str, label: str) -> list[Verdict]:
    cells = []
    for result in results:
        trained, size = attention_and_size(result["name"])
        for run in ("full", "moba"):
            cells.append(Cell(f"{trained} -> {run}", f"{size}, seed {result['seed']}", evaluated(result, loss, run)))
    blocks = [cell.block for cell in cells]
    cells = [cell for cell in cells if blocks.count(cell.block) == 2 * len(TRAINED)]
    if not cells:
        return []
    comparison = compare(cells)
    sparse = comparison.difference("moba -> moba", "full -> moba")
    full = comparison.difference("moba -> full", "full -> full")
    return [
        Verdict(f"Run with MoBA, training with MoBA gives the lower {label}", sparse, -math.inf, 0.0),
        Verdict(f"Run with full attention, training with full attention gives the lower {label}", full, 0.0, math.inf),
    ]
