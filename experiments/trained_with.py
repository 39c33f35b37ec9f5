"""F9: models trained with full attention and with MoBA, each run with both."""

import functools
import math
from collections.abc import Sequence

from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import COLOURS, NAMES, band, zero_line
from experiments.comparison import Verdict, compare, shared
from experiments.figure import Figure, Finding, Result
from experiments.fits import attention_and_size, paired
from experiments.trailing import BOTH, pairs_of

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
        """Losses above those of full attention throughout, of the same size and seed; bands over seeds."""
        panels = canvas.subplots(1, 2, sharey=True)
        pairs: dict[str, list[dict[str, Result]]] = {}
        for pair in sorted(pairs_of(results), key=lambda pair: pair["full"]["compute"]["6ND"]):
            pairs.setdefault(attention_and_size(pair["full"]["name"])[1], []).append(pair)
        seeds = min(map(len, pairs.values()), default=0)
        for axes, (loss, label) in zip(panels, LOSSES.items(), strict=True):
            for trained, run, style in (("full", "moba", "--"), ("moba", "full", "--"), ("moba", "moba", "-")):
                curves = [
                    [
                        evaluated(own[seed][trained], loss, run) - evaluated(own[seed]["full"], loss, "full")
                        for own in pairs.values()
                    ]
                    for seed in range(seeds)
                ]
                if curves:
                    name = f"{TRAINED[trained]}, run with {NAMES[run]}"
                    band(axes, range(len(pairs)), curves, COLOURS[trained], name, ls=style, marker="o")
            zero_line(axes)
            axes.set_xticks(range(len(pairs)), list(pairs))
            axes.set_ylabel(f"{label} above full, nats")
            axes.set_xlabel("parameters")
        canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, handlelength=3)


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
