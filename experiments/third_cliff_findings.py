"""What finished arms of the third cliff (F6) say."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter

from benchmarks.plotting import BLUE, FULL, GREEN, MOBA, PURPLE, band
from experiments.comparison import Cell, Verdict, compare
from experiments.figure import Result
from experiments.readings import Losses, validation_by_sequence, validation_loss

BAR = 0.1
"""Nats: the most that a base may lose on a recalled token. A token whose most likely prediction is wrong loses at least
ln 2, so that no more than a seventh of them can be wrong."""
AS_MOBA = "as-moba"
"""Name of the evaluation of the same weights with MoBA in all layers, and with full attention in all layers."""
LARGE = 0.05
"""Nats from which on a distance from full attention is worth dividing."""
SAME = 1e-3
"""Nats by which two losses of the same weights may differ."""
_COLOURS = {"none": MOBA, "last1": PURPLE, "last3": GREEN, "half": BLUE, "all": FULL}
_WORDS = {"none": "MoBA", "last1": "last 1 full", "last3": "last 3 full", "half": "last half full", "all": "full"}


def recall_loss(base: Result, attention: str = "moba") -> float:
    """Mean loss of the tokens that only recall predicts, with one attention in all layers, nats."""
    return float(base["evaluations"]["recall"]["validation_loss"][attention])


def base_verdict(base: Result) -> str:
    """Whether a base passes, in words."""
    loss, full = recall_loss(base), recall_loss(base, "full")
    passed = "passes" if loss <= BAR else "FAILS"
    return (
        f"the base of seed {base['seed']} {passed}: {loss:.4f} nats on each recalled token with MoBA in all layers, "
        f"{full:.4f} with full attention; the bar is {BAR}"
    )


def first_loss(result: Result) -> float:
    """Loss of the answers before the first step, with the variant's own layers."""
    return float(next(entry["eval_loss"] for entry in result["history"] if entry["evaluation"] == "validation_loss"))


def with_equal_starts(tuned: Sequence[Result]) -> tuple[list[Result], list[str]]:
    """The variants that began with the weights that most began with, and sentences about those that did not.

    Variants with the same layers and seed begin with the same loss, whatever their mask, as their weights are the same.
    """
    kept = []
    left_out = []
    for result in tuned:
        alike = [one for one in tuned if (_layers(one), one["seed"]) == (_layers(result), result["seed"])]
        others = [one for one in alike if abs(first_loss(one) - first_loss(result)) > SAME]
        if 2 * len(others) < len(alike):
            kept.append(result)
        else:
            left_out.append(
                f"{result['name']} of seed {result['seed']} began with a loss of {first_loss(result):.4f}, "
                f"{others[0]['name']} with {first_loss(others[0]):.4f}: not with the same weights"
            )
    return kept, left_out


def as_attention(result: Result, attention: str) -> float:
    """Loss of the answers after fine-tuning, with one attention in all layers."""
    return float(result["evaluations"][AS_MOBA]["validation_loss"][attention])


def as_moba_by_sequence(result: Result) -> Losses:
    """`as_attention` with MoBA of each sequence."""
    found: Losses = result["evaluations"][AS_MOBA]["validation_loss"].get("by_sequence", {}).get("moba", [])
    return found


def verdicts(tuned: Sequence[Result]) -> Iterator[Verdict]:
    """The claims, as far as there are arms for them."""
    # Once for each seed, as all masks begin alike.
    start = {(cell.arm, cell.block): cell for cell in _cells(tuned, first_loss, _layers)}
    claim = "Before the first step MoBA and full attention have the same loss, within 0.05"
    yield from compare(list(start.values())).judge(claim, {"none": 1.0, "all": -1.0}, -0.05, 0.05)
    after = compare(_cells(tuned, validation_loss, by_sequence=validation_by_sequence))
    moba = functools.partial(as_attention, attention="moba")
    back = compare(_cells(tuned, moba, by_sequence=as_moba_by_sequence))
    shares = sorted({_share(result) for result in tuned}, key=float)
    if not shares:
        return
    thin, thick = shares[0], shares[-1]
    gap = {f"none-{thin}": 1.0, f"all-{thin}": -1.0}
    yield from after.judge(f"At {thin} % MoBA is worse than full attention", gap, 0.0, math.inf)
    if thin != thick:
        wider = gap | {f"none-{thick}": -1.0, f"all-{thick}": 1.0}
        yield from after.judge(f"The gap at {thin} % is larger than at {thick} %", wider, 0.0, math.inf)
    claim = f"At {thin} % full attention in the last 3 layers is better than MoBA"
    yield from after.judge(claim, {f"last3-{thin}": 1.0, f"none-{thin}": -1.0}, -math.inf, 0.0)
    for layers in ("last3", "all"):
        claim = f"At {thin} %, {_WORDS[layers]} in fine-tuning and MoBA after it is no worse than MoBA in both"
        yield from back.judge(claim, {f"{layers}-{thin}": 1.0, f"none-{thin}": -1.0}, -math.inf, 0.0)


def _cells(
    tuned: Sequence[Result],
    value: Callable[[Result], float],
    arm: Callable[[Result], str] = lambda result: result["name"],
    by_sequence: Callable[[Result], Losses] = lambda result: (),
) -> list[Cell]:
    return [Cell(arm(result), f"seed {result['seed']}", value(result), by_sequence(result)) for result in tuned]


def fine_tuned_rows(tuned: Sequence[Result]) -> list[list[str]]:
    rows = [
        [
            "layers",
            "tokens with loss",
            "at step 0",
            "after",
            "as MoBA",
            "as full",
            "of the gap, as full",
            "gradient reach, first and last layer",
        ]
    ]
    for name in dict.fromkeys(result["name"] for result in tuned):
        runs = [result for result in tuned if result["name"] == name]
        values = [
            first_loss,
            validation_loss,
            lambda run: as_attention(run, "moba"),
            lambda run: as_attention(run, "full"),
        ]
        losses = [f"{statistics.mean(map(value, runs)):.4f}" for value in values]
        reach = [statistics.mean(_gradients(run)[0][place]["reach"] for run in runs) for place in (0, -1)]
        rows.append(
            [
                _WORDS[_layers(runs[0])],
                f"{_share(runs[0])} %",
                *losses,
                _recovered(tuned, runs),
                ", ".join(f"{100 * one:.0f} %" for one in reach),
            ]
        )
    return rows


def _recovered(tuned: Sequence[Result], runs: Sequence[Result]) -> str:
    """Part of a variant's distance from fine-tuning with full attention that its weights make up for when they run with
    full attention, as a cell of a table; a dash where they run so anyway, or the distance is nothing."""
    share = _share(runs[0])
    full = {one["seed"]: validation_loss(one) for one in tuned if (_layers(one), _share(one)) == ("all", share)}
    both = [
        (validation_loss(run) - full[run["seed"]], validation_loss(run) - as_attention(run, "full"))
        for run in runs
        if run["seed"] in full
    ]
    gap, gained = (sum(part) for part in zip(*both, strict=True)) if both else (0.0, 0.0)
    return f"{100 * gained / gap:.0f} %" if gap > LARGE * len(both) else "–"


def fine_tuned_alike(results: Sequence[Result]) -> list[tuple[float, float, float, float]]:
    """Losses of variants with full attention and with MoBA in all layers, for each seed and mask that has both: full
    attention, MoBA, MoBA's weights run with full attention, full attention's run with MoBA."""
    own = {(_layers(one), _share(one), one["seed"]): one for one in results if "-" in one["name"]}
    pairs = [
        (own["all", share, seed], one)
        for (layers, share, seed), one in own.items()
        if layers == "none" and ("all", share, seed) in own
    ]
    return [
        (validation_loss(full), validation_loss(moba), as_attention(moba, "full"), as_attention(full, "moba"))
        for full, moba in pairs
    ]


def base_rows(bases: Sequence[Result]) -> list[list[str]]:
    """What the bases recall, in the columns of `fine_tuned_rows`."""
    return [
        [
            f"**base, seed {base['seed']}{'' if recall_loss(base) <= BAR else ': FAILS'}**",
            "recalled",
            "–",
            "–",
            f"{recall_loss(base):.4f}",
            f"{recall_loss(base, 'full'):.4f}",
            "–",
            "–",
        ]
        for base in bases
    ]


def draw_fine_tuned(tuned: Sequence[Result], canvas: Canvas) -> None:
    """Loss by mask; gradient norm of the context by layer; its mass by distance in the last layer. Bands over seeds."""
    losses, by_layer, by_distance = canvas.subplots(1, 3)
    thinnest = min((_share(result) for result in tuned), key=float, default="")
    for layers, colour in _COLOURS.items():
        _draw_losses(losses, [result for result in tuned if _layers(result) == layers], colour)
        found = [_gradients(result) for result in tuned if result["name"] == f"{layers}-{thinnest}"]
        if found:
            norms = [[layer["context_norm"] for layer in one] for one, _ in found]
            mass = [one[-1]["mass"] for one, _ in found]
            band(by_layer, range(len(norms[0])), norms, colour, _WORDS[layers], marker="o", ms=3)
            band(by_distance, range(len(mass[0])), mass, colour, marker="o", ms=3)
            distances = [distance.partition("-")[0] for distance in found[0][1]]
            by_distance.set_xticks(range(0, len(distances), 4), distances[::4])
    for axes in (losses, by_layer):
        axes.set_yscale("log")
    losses.set_xscale("log")
    losses.set_ylabel("loss of the answers, nats")
    losses.set_xlabel("tokens with loss, %")
    by_layer.yaxis.set_minor_formatter(NullFormatter())
    by_layer.set_ylabel("gradient, context / answers")
    by_layer.set_xlabel(f"layer, {thinnest} % with loss")
    by_distance.set_ylabel("share of last layer's gradient")
    by_distance.set_xlabel("tokens away, at least")
    canvas.legend(loc="outside upper left", ncols=len(_COLOURS))


def _gradients(result: Result) -> tuple[list[dict[str, Any]], list[str]]:
    """For every layer, what the last gradient reach found with the variant's own layers; and the names of its
    distances."""
    found = result["stages"]["sft"]["gradient_reach"]["gradient_reach_layers"]
    return list(found["layers"][found["attention"]]), list(found["distances"])


def _draw_losses(axes: Axes, runs: Sequence[Result], colour: str) -> None:
    by_share: dict[float, list[float]] = {}
    for run in sorted(runs, key=lambda run: float(_share(run))):
        by_share.setdefault(float(_share(run)), []).append(validation_loss(run))
    axes.plot([*by_share], list(map(statistics.mean, by_share.values())), color=colour)
    axes.plot([float(_share(run)) for run in runs], list(map(validation_loss, runs)), "o", ms=3, color=colour)


def _layers(result: Result) -> str:
    return str(result["name"]).partition("-")[0]


def _share(result: Result) -> str:
    return str(result["name"]).partition("-")[2]
