"""False alarms of the spike detector, and the size of the spikes that it detects.

    python -m benchmarks.spike_alarms [RUN/metrics.jsonl ...] [--output FILE]

On synthetic curves and on the loss curves of runs without spikes (their `metrics.jsonl`): alarms per 10,000 steps at
several thresholds, and the fraction of injected spikes that is flagged at the default threshold. A spike is one step
whose loss, or gradient norm, is raised by a multiple of sigma, the curve's own noise around it. Sigma is measured on
logarithms, from the differences of successive values, which a trend hardly changes.
"""

import argparse
import math
import random
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.record import save
from moba_train.config.health import SpikeConfig
from moba_train.health.spike import SpikeDetector
from moba_train.telemetry.jsonl import read_records

Curve = list[tuple[str, float, float]]
"""Stage, loss and gradient norm of each step."""

THRESHOLDS = (4.0, 5.0, 6.0, 7.0, 8.0)
SPIKES = (3, 4, 5, 6, 7, 8, 9, 10)
SPACING = 60
"""Steps between injected spikes: beyond the 50 in which the detector waits for the loss to recover."""
SETTLED = 200
"""Steps before the first spike."""
NEIGHBOURS = 64
"""Values on either side from which the noise at a step is measured."""


def synthetic_curve(noise: str, steps: int, seed: int) -> Curve:
    """A run from scratch: a warm-up of 300 steps, a power law, a gradient norm that rises, falls and then creeps up.

    noise: "gaussian"; "heavy": Student's t with 8 degrees of freedom (6 sigma come 3,000 times as often as under a
    Gaussian); "drifting": Gaussian, half of whose variance is an autocorrelated part, as from data in blocks.
    """
    rng = random.Random(f"{noise}/{seed}")
    draw: Callable[[], float] = (lambda: _student(rng, 8)) if noise == "heavy" else (lambda: rng.gauss(0, 1))
    curve = []
    drift = [0.0, 0.0]
    for step in range(steps):
        own = [draw(), draw()]
        if noise == "drifting":
            drift = [0.95 * old + math.sqrt(1 - 0.95**2) * draw() for old in drift]
            own = [(white + slow) / math.sqrt(2) for white, slow in zip(own, drift, strict=True)]
        loss = 1.9 + 9.1 * (1 + max(0, step - 30) / 40) ** -0.55
        norm = 0.25 + 2.0 * (step / 60) * math.exp(1 - step / 60) + 0.1 * step / steps
        curve.append(("synthetic", loss * math.exp(0.012 * own[0]), norm * math.exp(0.12 * own[1])))
    return curve


def recorded_curve(path: Path) -> Curve:
    """The logged steps of a run."""
    records = [record for record in read_records(path) if record["type"] == "metrics"]
    return [(record["stage"], record["loss"], record["grad_norm"]) for record in records]


def flagged_steps(curve: Curve, warn_sigma: float) -> dict[int, tuple[float, float]]:
    """The steps that the detector flags, with the scores of loss and gradient norm of each. As in training, the
    detector starts over where a stage begins."""
    detector = SpikeDetector(SpikeConfig().window, warn_sigma)
    stage, *_ = curve[0]
    flagged = {}
    for step, (name, loss, grad_norm) in enumerate(curve):
        if name != stage:
            detector.rebaseline()
            stage = name
        report = detector.observe(step, loss, grad_norm)
        if report.flagged:
            flagged[step] = report.z_loss, report.z_grad
    return flagged


def detection_rate(curves: list[Curve], column: int, sigmas: float, warn_sigma: float) -> float:
    """The fraction of spikes of `sigmas` sigma in `column` (0 the loss, 1 the gradient norm) that is flagged; NaN where
    all curves are too short for one."""
    injected = found = 0
    for curve in curves:
        spiked = list(curve)
        steps = range(SETTLED, len(curve) - NEIGHBOURS, SPACING)
        for step in steps:
            stage, *values = spiked[step]
            values[column] *= math.exp(sigmas * _noise(curve, column, step))
            spiked[step] = (stage, values[0], values[1])
        found += len(flagged_steps(spiked, warn_sigma).keys() & set(steps))
        injected += len(steps)
    return found / injected if injected else math.nan


def _noise(curve: Curve, column: int, step: int) -> float:
    """Robust standard deviation of the logarithm around `step`."""
    logs = [math.log(values[column]) for _, *values in curve[max(0, step - NEIGHBOURS) : step + NEIGHBOURS]]
    return 1.4826 * statistics.median(abs(b - a) for a, b in pairwise(logs)) / math.sqrt(2)


def _student(rng: random.Random, freedom: int) -> float:
    return rng.gauss(0, 1) / math.sqrt(rng.gammavariate(freedom / 2, 2) / freedom)


def measure(curves: list[Curve]) -> dict[str, Any]:
    """Alarms at every threshold, their scores, and the detected fraction of spikes of every size."""
    steps = sum(map(len, curves))
    alarms = {
        f"{sigma:g}": 1e4 * sum(len(flagged_steps(curve, sigma)) for curve in curves) / steps for sigma in THRESHOLDS
    }
    threshold = SpikeConfig().warn_sigma
    scores = [flags for curve in curves for flags in flagged_steps(curve, threshold).values()]
    by_curve = {
        name: sorted(round(pair[column], 1) for pair in scores if pair[column] > threshold)
        for column, name in enumerate(("loss", "grad_norm"))
    }
    detected = {
        name: {str(sigmas): detection_rate(curves, column, sigmas, threshold) for sigmas in SPIKES}
        for column, name in enumerate(("loss", "grad_norm"))
    }
    return {
        "steps": steps,
        "alarms_per_10000_steps_by_threshold": alarms,
        "scores_of_alarms": by_curve,
        "detected_by_sigma": detected,
    }


def main(arguments: list[str] | None = None) -> None:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spike_alarms", description=description)
    parser.add_argument("runs", nargs="*", type=Path, help="metrics.jsonl of runs without spikes")
    parser.add_argument("--steps", type=int, default=5000, help="steps of a synthetic curve")
    parser.add_argument("--curves", type=int, default=4, help="synthetic curves of each kind")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/spike-alarms.json"))
    given = parser.parse_args(arguments)
    kinds = {
        noise: [synthetic_curve(noise, given.steps, seed) for seed in range(given.curves)]
        for noise in ("gaussian", "heavy", "drifting")
    }
    if given.runs:
        kinds["recorded"] = [recorded_curve(path) for path in given.runs]
    results = {}
    for kind, curves in kinds.items():
        results[kind] = measure(curves)
        print(f"\n{kind}: {results[kind]['steps']} steps")
        alarms = results[kind]["alarms_per_10000_steps_by_threshold"]
        print("  alarms per 10,000 steps  " + "  ".join(f"{sigma} sigma {rate:.1f}" for sigma, rate in alarms.items()))
        print(f"  scores of those at {SpikeConfig().warn_sigma:g}       {results[kind]['scores_of_alarms']}")
        for name, rates in results[kind]["detected_by_sigma"].items():
            print(f"  {name + ' spikes flagged':<24} " + "  ".join(f"{k} sigma {r:.0%}" for k, r in rates.items()))
    spike = SpikeConfig()
    settings = {"window": spike.window, "warn_sigma": spike.warn_sigma, "runs": len(given.runs), "spacing": SPACING}
    save(given.output, settings, results)


if __name__ == "__main__":
    main()
