"""F5: 90 % of the tokens with MoBA, the last 10 % with full attention."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import BLUE, COLOURS, INK, band, zero_line
from experiments.comparison import Cell, Verdict, compare, shared
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, TOKENS_PER_PARAMETER, batch_tokens, moba, parameters, recipe
from experiments.readings import bucket_middles, loss_by_position, position_wise
from moba_train.config.health import SpikeConfig
from moba_train.health.spike import RECOVERY_STEPS, SpikeDetector

SHARE = 0.9
"""Share of the tokens that the first stage has."""
STAGES = ("first", "last")
ARMS = {"full": ("full", "full"), "moba": ("moba", "moba"), "hybrid": ("moba", "full")}
"""Attention of both stages. All arms have both stages, so that data and learning rate are equal."""
OTHERS = {"hybrid": "90 % MoBA, 10 % full", "moba": "MoBA throughout"}
"""Arms that are compared with full attention, in words."""
CLOSE = 0.01
"""Nats within which two losses count as equal."""
SMOOTH = 10
"""Steps that a point of the picture is the mean of."""
_COLOURS = COLOURS | {"hybrid": BLUE}


class Hybrid(Figure):
    """90 % of the tokens with MoBA, then 10 % with full attention, against either of them throughout."""

    name = "hybrid"
    title = "F5. 90 % MoBA, 10 % full"

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Full attention, MoBA, and one after the other."""
        return [Arm(name, seed, _recipe(kinds, quick)) for name, kinds in ARMS.items()]

    def find(self, results: Sequence[Result]) -> Finding:
        """Losses by position against those of full attention, and what the detector says of the switch."""
        rows = [["tokens", "full", *(f"{name} - full" for name in OTHERS)]]
        verdicts = []
        for place, edges in enumerate(_buckets(results)):
            cells = _cells(results, functools.partial(_loss_at, place))
            found = compare(cells)
            if "full" not in found.arms:
                break
            others = {name: found.difference(name, "full") for name in OTHERS if name in found.arms}
            full = statistics.mean(cell.value for cell in cells if cell.arm == "full")
            rows.append([edges, f"{full:.4f}", *(str(others.get(name, "–")) for name in OTHERS)])
        if len(rows) > 1:
            for name, estimate in others.items():
                claim = f"In the last tokens, the loss of {OTHERS[name]} is within {CLOSE} of full attention's"
                verdicts.append(Verdict(claim, estimate, -CLOSE, CLOSE))
        steps = compare(_cells(results, lambda result: float(result["boundaries"][-1]["loss_step"])))
        claim = f"The switch raises the training loss by less than {CLOSE} (mean of 10 steps, against no switch)"
        verdicts += steps.judge(claim, {"hybrid": 1.0, "full": -1.0}, -math.inf, CLOSE)
        scores = {f"{result['name']}, seed {result['seed']}": armed_scores(result) for result in results}
        rows.append(
            [
                f"**largest z-score, {RECOVERY_STEPS} steps after the switch**",
                *("**loss**", "**gradient norm**", "**steps flagged**"),
            ]
        )
        for name, score in scores.items():
            rows.append([name, f"{score['loss']:.1f}", f"{score['norm']:.1f}", str(score["flagged"])])
        return Finding(verdicts, rows, {"scores": scores})

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Loss above full attention's with the same seed, a band over seeds: by position at the end, and in training
        around the switch."""
        left, right = canvas.subplots(1, 2)
        full = {result["seed"]: result for result in results if result["name"] == "full"}
        for arm, words in OTHERS.items():
            own = [result for result in results if result["name"] == arm and result["seed"] in full]
            if not own:
                continue
            colour = _COLOURS[arm]
            gaps = [loss_by_position(result) - loss_by_position(full[result["seed"]]) for result in own]
            band(left, bucket_middles(own[0]) / 1024, gaps, colour, words)
            for side, first in (("before", -_around(own[0], "before").size), ("after", 0)):
                losses = [_smooth(_around(result, side) - _around(full[result["seed"]], side)) for result in own]
                band(right, first + (SMOOTH - 1) / 2 + np.arange(losses[0].size), losses, colour)
        right.axvline(0, color=INK, lw=0.8, ls=":")
        canvas.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        for axes, what, x in (
            (left, "loss above full, nats", "position in the context, K tokens"),
            (right, "training loss above full, nats", f"steps from the switch, means of {SMOOTH}"),
        ):
            zero_line(axes)
            axes.set_ylabel(what)
            axes.set_xlabel(x)


def _recipe(kinds: tuple[str, str], quick: bool) -> dict[str, Any]:
    """Two stages of one length, with an attention each."""
    size = "small" if quick else "4m"
    attention = moba(16, 2) if quick else moba(512, 3)
    length, batch = (128, 512) if quick else (8192, batch_tokens(8192))
    tokens = 24 * batch if quick else TOKENS_PER_PARAMETER * parameters(size)
    evaluation = {
        "sequences": 4 if quick else 128,
        "position_wise": {"bucket": 32 if quick else 512, "sequences": 4 if quick else 256, "attention": "own"},
    }
    made = recipe(size, attention, length, tokens, batch, evaluation)
    shares = (SHARE, 1 - SHARE)
    *short, whole = made["stages"]
    made["stages"] = short + [
        {**whole, "name": name, "tokens": round(share * whole["tokens"]), "attention": {} if kind == "moba" else FULL}
        for name, share, kind in zip(STAGES, shares, kinds, strict=True)
    ]
    return made


def armed_scores(result: Result) -> dict[str, Any]:
    """The largest scores of the trainer's spike detector in the steps after the last switch of stage, and how many it
    flags, when it is not told of the switch."""
    switch = result["switches"][-1]
    settings = SpikeConfig()
    detector = SpikeDetector(settings.window, settings.warn_sigma)
    before, after = (
        list(zip(part["loss"], part["grad_norm"], strict=True)) for part in (switch["before"], switch["after"])
    )
    for step, values in enumerate(before):
        detector.observe(step, *values)
    reports = [detector.observe(len(before) + step, *values) for step, values in enumerate(after)]
    return {
        "loss": max(report.z_loss for report in reports),
        "norm": max(report.z_grad for report in reports),
        "flagged": sum(report.flagged for report in reports),
    }


def _around(result: Result, side: str) -> npt.NDArray[np.float64]:
    """Training loss, nats, of each step `before` or `after` the last switch of stage."""
    return np.array(result["switches"][-1][side]["loss"])


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Means of `SMOOTH` neighbours, of all values where there are fewer."""
    windows = np.lib.stride_tricks.sliding_window_view(values, min(SMOOTH, values.size))
    return np.asarray(windows.mean(axis=1))


def _loss_at(bucket: int, result: Result) -> float:
    return float(loss_by_position(result)[bucket])


def _buckets(results: Sequence[Result]) -> list[str]:
    """The buckets of the context, in words."""
    if not results:
        return []
    width = position_wise(results[0])["bucket"]
    return [f"{width * place} to {width * (place + 1)}" for place in range(len(loss_by_position(results[0])))]


def _cells(results: Sequence[Result], value: Callable[[Result], float]) -> list[Cell]:
    return shared([Cell(result["name"], f"seed {result['seed']}", value(result)) for result in results])
