"""F8: MoBA's versions beside full attention: several sizes and learning rates, and inserted into a trained model."""

import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from benchmarks.plotting import BLUE, COLOURS, GREEN, INK, PURPLE, zero_line
from experiments.comparison import ABOVE, Cell, Verdict, above, compare
from experiments.figure import Arm, Figure, Finding, Result
from experiments.models import FULL, batch_tokens, learning_rate, moba, recipe
from experiments.readings import validation_by_sequence, validation_loss

SIZES = {"4m": 60_000_000, "10m": 100_000_000, "25m": 90_000_000}
"""Training tokens of each size."""
RATES = (0.5, 1, 4)
"""Peak learning rates, in units of `models.learning_rate`."""
INSERTED_SIZE = "10m"
SEQ_LEN = 8192
KINDS = ("full", "moba_v05", "moba_v1-sum", "moba_v1-gate", "moba")
LABELS = {"moba_v05": "v0.5", "moba_v1-sum": "v1, sum", "moba_v1-gate": "v1, gate", "moba": "v2", "full": "full"}
_COLOURS = COLOURS | {"moba_v05": PURPLE, "moba_v1-sum": BLUE, "moba_v1-gate": GREEN}
WITH_FULL = "full-in-place"
"""Name of the evaluation of a trained model with full attention in all layers."""


def attention(kind: str, block_size: int, topk: int) -> dict[str, Any]:
    """The section `attention` of a version."""
    if kind == "full":
        return dict(FULL)
    if kind == "moba":
        return moba(block_size, topk)
    name, _, merge = kind.partition("-")
    sizes = {"block_size": block_size, "topk": topk}
    return {"default": name, name: {**sizes, **({"merge": merge} if merge else {})}}


class Versions(Figure):
    """MoBA v0.5, v1 and v2 beside full attention: loss, gradient norm, spikes, and full attention in their place."""

    name = "versions"
    title = "F8. The three versions"
    seeds: ClassVar[tuple[int, ...]] = (0,)

    def arms(self, seed: int, quick: bool) -> list[Arm]:
        """The middle rate first, then what is inserted, then the other rates, of the smallest size first."""
        sizes = {"tiny": 4096} if quick else SIZES
        rates = (1,) if quick else RATES
        inserted = "tiny" if quick else INSERTED_SIZE
        trained = {
            (size, rate): [_trained(kind, size, rate, tokens, seed, quick) for kind in KINDS]
            for size, tokens in sizes.items()
            for rate in rates
        }
        kinds = ("moba_v05", "moba_v1-sum", "moba") if quick else KINDS
        later = [_inserted(kind, inserted, sizes[inserted], seed, quick) for kind in kinds]
        middle = [arm for (_, rate), arms in trained.items() if rate == 1 for arm in arms]
        others = [arm for (_, rate), arms in trained.items() if rate != 1 for arm in arms]
        return [*middle, *later, *others]

    def find(self, results: Sequence[Result]) -> Finding:
        """For each version and size its best rate, spikes over all rates; then what insertion costs."""
        rows = [["", "loss, best rate", *ABOVE, "rate", "full in place", "spikes", "largest gradient norm"]]
        groups = _by_kind_and_size(_trained_arms(results))
        for size, kind in product(_sizes(results), KINDS):
            own = groups.get((kind, size))
            if own is None:
                continue
            best = _at_best_rate(own)
            full = groups.get(("full", size))
            spikes = sum(len(result["spikes"]) for result in own)
            norm = max(norm for result in own for _, norm in result["gradient_norms"])
            changes = [change for one in best if (change := full_in_place(one)) is not None]
            cells = [f"x{_rate(best[0]):g}", f"{statistics.mean(changes):+.4f}" if changes else "–"]
            cells += [f"{spikes} in {len(own)} arms", f"{norm:.2f}"]
            above_full = _above_full(best, _at_best_rate(full) if full else [])
            loss = statistics.mean(map(validation_loss, best))
            rows.append([f"{LABELS[kind]}, {size}", f"{loss:.4f}", *above_full, *cells])
        costs = insertion_costs(results)
        if costs:
            rows.append(["**inserted into full**", "**cost at once**", "**after training on**", *[""] * 5])
        for kind, (at_once, after, _) in costs.items():
            rows.append([LABELS[kind], f"{at_once:+.4f}", f"{after:+.4f}", *[""] * 5])
        numbers = {kind: {"at_once": at_once, "after": after} for kind, (at_once, after, _) in costs.items()}
        return Finding(_verdicts(results), rows, {"inserted": numbers})

    def draw(self, results: Sequence[Result], canvas: Canvas) -> None:
        """Loss above full attention by rate; gradient norms of the largest size at its highest rate; insertion."""
        left, middle, right = canvas.subplots(1, 3)
        _draw_gaps(left, results)
        _draw_norms(middle, results)
        for kind, (_, _, curve) in insertion_costs(results).items():
            right.plot(*zip(*curve, strict=True), color=_COLOURS[kind], lw=1.2)
        right.set_ylabel("training loss after insertion")
        right.set_xlabel("steps")
        sizes, _ = left.get_legend_handles_labels()
        handles = [Line2D([], [], color=_COLOURS[kind], label=LABELS[kind]) for kind in KINDS]
        canvas.legend(handles=handles + sizes, loc="outside upper left", ncols=len(KINDS) + len(sizes), columnspacing=1)


def _trained(kind: str, size: str, rate: float, tokens: int, seed: int, quick: bool) -> Arm:
    section = attention(kind, 16, 3) if quick else attention(kind, 512, 3)
    shape = (
        (128, tokens, 2048, {"sequences": 4}) if quick else (SEQ_LEN, tokens, batch_tokens(SEQ_LEN), {"sequences": 256})
    )
    content = recipe(size, section, *shape)
    content["optim"] = {**content["optim"], "lr": rate * learning_rate(size)}
    both = {WITH_FULL: ["attention.default=full", "--tasks", "validation_loss"]}
    return Arm(f"{kind}-{size}-x{rate:g}", seed, content, {} if kind == "full" else both)


def _inserted(kind: str, size: str, tokens: int, seed: int, quick: bool) -> Arm:
    """A tenth of the tokens more, at a tenth of the rate, which is where the parent's schedule ended."""
    base = _trained(kind, size, 0.1, tokens // 10 if not quick else tokens // 2, seed, quick)
    content = dict(base.recipe)
    content["stages"] = content["stages"][-1:]
    content["optim"] = {**content["optim"], "schedule": {"kind": "constant"}}
    content["evaluation"] = {**content["evaluation"], "at_start": True}
    return Arm(f"inserted-{kind}", seed, content, parent=f"full-{size}-x1")


def _trained_arms(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if not result["name"].startswith("inserted-")]


def _parts(result: Result) -> tuple[str, str, str]:
    kind, size, rate = result["name"].rsplit("-", 2)
    return kind, size, rate.removeprefix("x")


def _kind(result: Result) -> str:
    return _parts(result)[0]


def _size(result: Result) -> str:
    return _parts(result)[1]


def _sizes(results: Sequence[Result]) -> list[str]:
    """The sizes that were trained, the smallest first."""
    parameters: dict[str, int] = {}
    for result in _trained_arms(results):
        parameters[_size(result)] = min(result["parameters"], parameters.get(_size(result), result["parameters"]))
    return sorted(parameters, key=parameters.__getitem__)


def _rate(result: Result) -> float:
    return float(_parts(result)[2])


def full_in_place(result: Result) -> float | None:
    """How much full attention in all layers raises the validation loss; None for a model that was trained with it."""
    found = result["evaluations"].get(WITH_FULL)
    return None if found is None else float(found["validation_loss"]["full"]) - validation_loss(result)


def insertion_costs(results: Sequence[Result]) -> dict[str, tuple[float, float, list[tuple[int, float]]]]:
    """By kind, means over seeds: validation loss above that of the full model, before the first step and at the end;
    and a seed's training loss over the steps."""
    parents = {(result["name"], result["seed"]): result for result in results}
    found: dict[str, list[tuple[float, float]]] = {}
    curves = {}
    for result in results:
        parent = parents.get((result["parent"], result["seed"]))
        if not result["name"].startswith("inserted-") or parent is None:
            continue
        kind = result["name"].removeprefix("inserted-")
        losses = [one["eval_loss"] for one in result["history"] if one["evaluation"] == "validation_loss"]
        before = validation_loss(parent)
        found.setdefault(kind, []).append((losses[0] - before, losses[-1] - before))
        curves[kind] = result["losses"]
    return {
        kind: (statistics.mean(one for one, _ in pairs), statistics.mean(last for _, last in pairs), curves[kind])
        for kind, pairs in found.items()
    }


def best_pairs(results: Sequence[Result], kind: str) -> list[tuple[Result, Result]]:
    """Full attention and a version, each at its best rate, for each size and seed that have both."""
    groups = _by_kind_and_size(_trained_arms(results))
    found = []
    for size in _sizes(results):
        full, own = (
            {one["seed"]: one for one in _at_best_rate(groups[name, size])} if (name, size) in groups else {}
            for name in ("full", kind)
        )
        found += [(full[seed], own[seed]) for seed in full if seed in own]
    return found


def _above_full(best: Sequence[Result], full: Sequence[Result]) -> list[str]:
    """How far a version at its best rate is above full attention at its own, of the same size."""
    cells = [
        Cell(_kind(one), f"seed {one['seed']}", validation_loss(one), validation_by_sequence(one))
        for one in [*best, *full]
    ]
    return above(cells, _kind(best[0]), "full")


def _by_kind_and_size(trained: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for one in trained:
        groups.setdefault((_kind(one), _size(one)), []).append(one)
    return groups


def _at_best_rate(own: Sequence[Result]) -> list[Result]:
    """Those arms of a version and size, all seeds, whose rate has the lowest validation loss, mean over seeds; a rate
    that lacks seeds is not among the choices, as seeds differ."""
    by_rate: dict[float, list[Result]] = {}
    for one in own:
        by_rate.setdefault(_rate(one), []).append(one)
    return min(by_rate.values(), key=lambda arms: (-len(arms), statistics.mean(map(validation_loss, arms))))


def _verdicts(results: Sequence[Result]) -> list[Verdict]:
    """Losses at each version's best rate, in blocks of a size and a seed; spikes of all arms, in blocks of a rate, too.

    Only two versions are compared at a time: how much the others scatter from size to size says nothing of these two.
    """
    trained = _trained_arms(results)
    best = [one for own in _by_kind_and_size(trained).values() for one in _at_best_rate(own)]
    validation = [
        Cell(_kind(one), _size_and_seed(one), validation_loss(one), validation_by_sequence(one)) for one in best
    ]
    exchanged = [
        Cell(_kind(one), _size_and_seed(one), change) for one in best if (change := full_in_place(one)) is not None
    ]
    spikes = [Cell(_kind(one), f"{_size_and_seed(one)}, x{_rate(one):g}", float(len(one["spikes"]))) for one in trained]
    wanted = [
        ("v2's validation loss is within 0.005 of full attention's", validation, "moba", "full", -0.005, 0.005),
        ("v1's validation loss, with sums, is above v2's", validation, "moba_v1-sum", "moba", 0.0, math.inf),
        ("v1 with sums has more spikes than v2, per arm", spikes, "moba_v1-sum", "moba", 0.0, math.inf),
        (
            "Full attention in v1's place raises the loss more than in v2's",
            exchanged,
            "moba_v1-sum",
            "moba",
            0.0,
            math.inf,
        ),
    ]
    return [
        verdict
        for claim, cells, arm, reference, low, high in wanted
        for verdict in compare([cell for cell in cells if cell.arm in (arm, reference)]).judge(
            claim, {arm: 1.0, reference: -1.0}, low, high
        )
    ]


def _size_and_seed(result: Result) -> str:
    return f"{_size(result)}, seed {result['seed']}"


def _draw_gaps(axes: Axes, results: Sequence[Result]) -> None:
    """A colour for each version, as in the other panels, and a marker for each size."""
    trained = _trained_arms(results)
    full = {(_size(one), _rate(one), one["seed"]): validation_loss(one) for one in trained if _kind(one) == "full"}
    markers = dict(zip(_sizes(results), "Dos", strict=False))
    for kind in KINDS[1:]:
        for size, marker in markers.items():
            points: dict[float, list[float]] = {}
            for one in trained:
                reference = full.get((size, _rate(one), one["seed"]))
                if (_kind(one), _size(one)) == (kind, size) and reference is not None:
                    points.setdefault(_rate(one), []).append(validation_loss(one) - reference)
            if points:
                means = [statistics.mean(points[rate]) for rate in sorted(points)]
                axes.plot(sorted(points), means, marker, ls="-", lw=1, color=_COLOURS[kind])
    for size, marker in markers.items():
        axes.plot([], [], marker, ls="", color=INK, label=size)
    zero_line(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RATES, map(str, RATES))
    axes.set_ylabel("validation loss above full")
    axes.set_xlabel("learning rate / usual")


def _draw_norms(axes: Axes, results: Sequence[Result]) -> None:
    trained = _trained_arms(results)
    if not trained:
        return
    last = max(trained, key=lambda one: (one["parameters"], _rate(one)))
    for kind in KINDS:
        own = [one for one in trained if (_kind(one), _size(one), _rate(one)) == (kind, _size(last), _rate(last))]
        for one in own[:1]:
            axes.plot(*zip(*one["gradient_norms"], strict=True), color=_COLOURS[kind], lw=0.8)
    axes.set_yscale("log")
    axes.set_ylabel(f"gradient norm, {_size(last)}")
    axes.set_xlabel(f"steps at {_rate(last):g} times the usual rate")
