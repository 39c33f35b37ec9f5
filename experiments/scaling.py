"""F1: validation loss of MoBA and of full attention over compute, at 8K tokens."""

import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from benchmarks.plotting import COLOURS, GREEN, MOBA, NAMES, zero_line
from experiments import published
from experiments.comparison import ABOVE, Verdict, above, compare
from experiments.figure import Arm, Figure, Finding, Result
from experiments.fits import AXES, Fits, attention_and_size, fit, paired
from experiments.models import FULL, TOKENS_PER_PARAMETER, batch_tokens, moba, parameters, recipe
from experiments.rates import moba_over_full
from experiments.readings import Losses, validation_by_sequence, validation_loss

QUICK_SIZES = ("tiny", "small", "large")


class ScalingFigure(Figure):
    """A loss of MoBA and of full attention, with models of several sizes, over the compute that trained them."""

    sizes: ClassVar[tuple[str, ...]]
    seq_len: ClassVar[int]
    block_size = 512
    topk = 3
    loss_name: ClassVar[str]
    laws: ClassVar[Mapping[str, published.Law]]
    evaluation: ClassVar[Mapping[str, Any]]
    quick_evaluation: ClassVar[Mapping[str, Any]]

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """Both attentions in each size, small models first."""
        found = []
        for size in QUICK_SIZES if quick else self.sizes:
            for attention in ("full", "moba"):
                found.append(self.arm(attention, size, seed, quick))
        return found

    def arm(self, attention: str, size: str, seed: int, quick: bool) -> Arm:
        """20 training tokens for each parameter; in the quick form a few steps."""
        if quick:
            kind = moba(16, self.topk) if attention == "moba" else FULL
            shape = (256, 8192, 2048, self.quick_evaluation)
        else:
            kind = moba(self.block_size, self.topk) if attention == "moba" else FULL
            tokens = TOKENS_PER_PARAMETER * parameters(size)
            shape = (self.seq_len, tokens, batch_tokens(self.seq_len), self.evaluation)
        return Arm(f"{attention}-{size}", seed, recipe(size, kind, *shape), self.evaluations(quick))

    def evaluations(self, quick: bool) -> dict[str, Sequence[str]]:
        """Evaluations behind training."""
        return {}

    def find(self, results: Sequence[Result]) -> Finding:
        """Means by size, fits over both computes, and what follows."""
        rows: list[list[str]] = [["", "full", "MoBA", *ABOVE]]
        small_first = sorted(results, key=lambda result: result["compute"]["6ND"])
        for size in dict.fromkeys(attention_and_size(result["name"])[1] for result in small_first):
            cells = [_mean_text(results, f"{attention}-{size}", self.loss) for attention in ("full", "moba")]
            own = [result for result in results if attention_and_size(result["name"])[1] == size]
            gap = above(paired(own, self.loss, self.by_sequence), "moba", "full")
            rows.append([f"{self.loss_name}, {size}", *cells, *gap])
        laws = {axis: found for axis in AXES if (found := fit(results, self.loss, axis)) is not None}
        if laws:
            rows.append(["**L = a C^b**, PFLOP/s-days", "**a**", "**b**", "", ""])
            rows += [[name, a, b, "", ""] for fits in laws.values() for name, a, b in fits.rows()]
            rows.append(["**MoBA above full, by these fits**", "**%**", "**at, PFLOP/s-days**", "", ""])
            rows += [[f"at equal {what}", gap, at, "", ""] for what, gap, at in self._gaps(results, laws)]
        return Finding(self.verdicts(results), rows, {axis: fits.to_json() for axis, fits in laws.items()})

    def _gaps(self, results: Sequence[Result], laws: Mapping[str, Fits]) -> Iterator[tuple[str, str, str]]:
        """Gaps between the fits at equal tokens, real FLOPs and time, each with its interval and the compute: the
        middle of what both attentions have models of."""
        middles = {axis: middle(results, axis) for axis in laws}
        rate = moba_over_full(self.seq_len)
        for what, axis, tokens in (("tokens", "6ND", 1.0), ("real FLOPs", "real", 1.0), ("time", "6ND", rate)):
            if axis in laws and tokens is not None:
                gap = laws[axis].gap(middles[axis], tokens)
                label = f"{what}, {tokens:.2f} times the tokens" if what == "time" else what
                yield label, f"{gap.value:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]", f"{middles[axis]:.1e}, {AXES[axis]}"

    @abstractmethod
    def loss(self, result: Result) -> float:
        """The loss that the figure is about."""

    @abstractmethod
    def by_sequence(self, result: Result) -> Losses:
        """That loss of each sequence."""

    @abstractmethod
    def verdicts(self, results: Sequence[Result]) -> list[Verdict]:
        """The claims of this figure."""

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Losses with their fits over both computes, and the gap beside the published one."""
        left, middle, right = canvas.subplots(1, 3)
        for axes, (axis, label) in zip((left, middle), AXES.items(), strict=True):
            _draw_losses(axes, results, self.loss, axis)
            axes.set_ylabel(f"{self.loss_name}, nats")
            axes.set_xlabel(f"PFLOP/s-days, {label}")
        _draw_gaps(right, results, self.loss, self.laws)
        right.set_ylabel("MoBA above full, %")
        right.set_xlabel("PFLOP/s-days, 6ND")
        left.legend()


def middle(results: Sequence[Result], axis: str) -> float:
    """Geometric middle of the computes that both attentions have models of."""
    by_attention: dict[str, list[float]] = {}
    for result in results:
        by_attention.setdefault(attention_and_size(result["name"])[0], []).append(result["compute"][axis])
    low = max(map(min, by_attention.values()))
    high = min(map(max, by_attention.values()))
    return float((low * high) ** 0.5)


def _mean_text(results: Sequence[Result], name: str, loss: Callable[[Result], float]) -> str:
    found = [result for result in results if result["name"] == name]
    seeds = f"seed {found[0]['seed']}" if len(found) == 1 else f"{len(found)} seeds"
    return f"{statistics.mean(map(loss, found)):.4f} ({seeds})" if found else "–"


def _draw_losses(axes: Axes, results: Sequence[Result], loss: Callable[[Result], float], axis: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    fits = fit(results, loss, axis)
    for attention in ("full", "moba"):
        own = [result for result in results if attention_and_size(result["name"])[0] == attention]
        x = [result["compute"][axis] for result in own]
        axes.plot(x, [loss(result) for result in own], "o", color=COLOURS[attention], label=NAMES[attention])
        if fits is not None:
            found = fits.by_attention[attention]
            line = np.geomspace(min(x), max(x), 30)
            bands = np.percentile([found.samples(c) for c in line], [2.5, 97.5], axis=1)
            axes.plot(line, [float(found.law(c)) for c in line], lw=1.2, color=COLOURS[attention])
            axes.fill_between(line, *bands, alpha=0.15, lw=0, color=COLOURS[attention])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:.0e}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:.2f}")
    axes.yaxis.set_minor_formatter("{x:.2f}")


def _draw_gaps(
    axes: Axes, results: Sequence[Result], loss: Callable[[Result], float], laws: Mapping[str, published.Law]
) -> None:
    by_name = {(result["name"], result["seed"]): result for result in results}
    points = []
    for (name, seed), result in by_name.items():
        attention, size = attention_and_size(name)
        full = by_name.get((f"full-{size}", seed))
        if attention == "moba" and full is not None:
            points.append((result["compute"]["6ND"], 100 * (loss(result) / loss(full) - 1)))
    if points:
        axes.plot(*zip(*points, strict=True), "o", color=MOBA, label="here")
        ends = min(point[0] for point in points), max(*published.TRAINED_COMPUTE)
        line = np.geomspace(*ends, 60)
        inside = line >= min(published.TRAINED_COMPUTE)
        gap = np.array([100 * (laws["moba"](c) / laws["full"](c) - 1) for c in line])
        axes.plot(line[inside], gap[inside], color=GREEN, label="published fit")
        axes.plot(line, gap, color=GREEN, lw=1, ls=":", label="extrapolated")
        zero_line(axes)
        axes.set_ylim(top=1.4 * axes.dataLim.ymax)
        axes.legend()
    axes.set_xscale("log")


class Scaling(ScalingFigure):
    """Validation loss of MoBA and of full attention over compute."""

    name = "scaling"
    title = "F1. Scaling at 8K: MoBA against full attention"
    sizes = ("4m", "6m", "10m", "15m", "21m")
    seq_len = 8192
    loss_name = "validation loss"
    laws = published.VALIDATION_8K
    evaluation = {"sequences": 256}
    quick_evaluation = {"sequences": 4}

    def loss(self, result: Result) -> float:
        """Validation loss."""
        return validation_loss(result)

    def by_sequence(self, result: Result) -> Losses:
        """Validation loss of each sequence."""
        return validation_by_sequence(result)

    def verdicts(self, results: Sequence[Result]) -> list[Verdict]:
        """The gap over all sizes, and the slopes."""
        comparison = compare(paired(results, validation_loss, validation_by_sequence))
        claim = "MoBA's validation loss is within 0.01 of full attention's"
        found = comparison.judge(claim, {"moba": 1.0, "full": -1.0}, -0.01, 0.01)
        if (fits := fit(results, validation_loss, "6ND")) is not None:
            claim = "The exponents of both fits over 6ND are within 0.005 of each other"
            found.append(Verdict(claim, fits.slopes(), -0.005, 0.005))
        return found
