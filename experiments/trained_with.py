"""F9: models trained with full attention and with MoBA, each run with both."""

import functools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import COLOURS
from experiments.comparison import Verdict, compare, shared
from experiments.figure import Figure, Finding, Result
from experiments.fits import attention_and_size, paired
from experiments.trailing import BOTH

TRAINED = {"full": "trained with full", "moba": "trained with MoBA"}
LOSSES = {"validation": "validation loss", "trailing": "trailing loss"}


class TrainedWith(Figure):
    """Full attention and MoBA trained, each evaluated with both, on the models of `trailing`."""

    name = "trained-with"
    source = "trailing"
    title = "F9. Train with, run with"

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

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """What running with MoBA costs, and what training with it costs when run with full attention."""
        panels = canvas.subplots(1, 2, sharey=True)
        ascending = sorted(results, key=lambda result: result["compute"]["6ND"])
        sizes = list(dict.fromkeys(attention_and_size(result["name"])[1] for result in ascending))
        for axes, (loss, label) in zip(panels, LOSSES.items(), strict=True):
            for trained, name in TRAINED.items():
                own = [result for result in results if attention_and_size(result["name"])[0] == trained]
                for run, style in (("full", "o"), ("moba", "^")):
                    x = [sizes.index(attention_and_size(result["name"])[1]) for result in own]
                    y = [evaluated(result, loss, run) for result in own]
                    axes.plot(x, y, style, ms=6, color=COLOURS[trained], alpha=0.8, label=f"{name}, run with {run}")
            axes.set_xticks(range(len(sizes)), sizes)
            axes.set_ylabel(f"{label}, nats")
            axes.set_xlabel("parameters")
            axes.margins(x=0.15)
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)


def evaluated(result: Result, loss: str, run: str) -> float:
    """Validation or trailing loss of an arm's last checkpoint, run with full attention or with MoBA."""
    found = result["evaluations"][BOTH]
    if loss == "validation":
        return float(found["validation_loss"][run])
    return float(found["position_wise"]["curves"][run]["mean"][-1])


def _verdicts(results: Sequence[Result], loss: str, label: str) -> list[Verdict]:
    found = {}
    for run in ("full", "moba"):  # apart: both runs of a model have its deviation in common, and are not independent
        cells = paired(results, functools.partial(evaluated, loss=loss, run=run), lambda _: ())
        comparison = compare(shared(cells))
        if not comparison.knows({"moba": 1.0, "full": -1.0}):
            return []
        found[run] = comparison.difference("moba", "full")
    sparse, full = found["moba"], found["full"]
    return [
        Verdict(f"Run with MoBA, training with MoBA gives the lower {label}", sparse, -math.inf, 0.0),
        Verdict(f"Run with full attention, training with full attention gives the lower {label}", full, 0.0, math.inf),
    ]
