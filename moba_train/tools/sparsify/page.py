"""The report of `moba-train sparsify`: tables in one HTML file, and the same numbers in summary.json."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moba_train.config.base import format_count, format_duration
from moba_train.output_files import write_atomically
from moba_train.tools.full_layers import format_difference
from moba_train.tools.report.page import filled
from moba_train.tools.sparsify import recipes
from moba_train.tools.sparsify.recipes import Request
from moba_train.tools.sparsify.steps import SECONDS, Step, read_json, training

SUMMARY = "summary.json"
PAGE = "report.html"
BAR = {"needle": 0.95, "trailing": 0.01, "ruler": 0.02}
"""Least share of full attention's needles, most nats of trailing loss above it, most of RULER's score below it."""


class Table(NamedTuple):
    """A heading, a sentence, and rows, whose first cells are their names."""

    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(request: Request, output: Path, done: Sequence[Step]) -> Path:
    """Write report.html and summary.json of what the steps have left in `output`; returns the page's path."""
    found = summary(request, output)
    write_atomically(output / SUMMARY, json.dumps(found, indent=2) + "\n")
    exported = next(step for step in done if step.name == "export").done
    text = filled(
        "sparsify.html.j2",
        title=f"{Path(request.model).name}, made sparse",
        request=recipes.told(request),
        verdict=verdict(found),
        tables=tables(found),
        fragment="\n".join(found["calibration"]["yaml"]),
        use=_use(request, output, exported),
        charts={step.name: step.charts.relative_to(output).as_posix() for step in done if step.charts.is_file()},
        commands=[step.command for step in done],
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    write_atomically(output / PAGE, text)
    return output / PAGE


def summary(request: Request, output: Path) -> dict[str, Any]:
    """All numbers of the report, as JSON values."""
    oracle = read_json(output / "oracle" / "evaluation.json")["oracle"]
    calibration = read_json(output / "calibration" / "evaluation.json")["full_layers"]
    arms: dict[str, list[dict[str, Any]]] = {}
    for arm in recipes.arms(request):
        for seed in range(1, request.seeds + 1):
            evaluation = read_json(output / "evaluation" / f"{arm}-{seed}" / "evaluation.json")
            trained = training(output / "runs" / f"{arm}-{seed}" / "metrics.jsonl")
            arms.setdefault(arm, []).append({"seed": seed, **trained, **scores_of(evaluation)})
    return {
        "request": request.model_dump(mode="json"),
        "oracle": {"budgets": oracle["budgets"], "full": oracle["attentions"]["full"]["scores"]},
        "calibration": calibration,
        "arms": arms,
        "seconds": read_json(output / SECONDS),
    }


def scores_of(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Scores of one evaluation.json with the arm's own attention, to compare arms by."""
    own = evaluation["attention"]
    needle = evaluation["needle"]
    by_depth = needle["maps"][own]["passed"]
    ruler = evaluation["ruler"]
    tasks = ruler["scores"][own]["teacher_forced"].values()
    errors = None
    if oracle := evaluation.get("oracle"):
        first = oracle["budgets"][0]
        errors = first["loss"] | {"weights": oracle["weights"] and oracle["weights"]["loss"]}
        if not first.get("own_gate", True):
            errors.pop("selector", None)  # MoBA's gate's, as the arm's own selection has other sizes
    return {
        "trailing": evaluation["numbers"]["trailing_loss"],
        "trailing_full": evaluation["numbers"].get("trailing_loss_full"),
        "trailing_by_sequence": evaluation["position_wise"]["curves"][own]["trailing_by_sequence"],
        "trailing_documents": evaluation["position_wise"]["documents"],
        "needle": evaluation["numbers"]["needle"],
        "needle_full": evaluation["numbers"].get("needle_full"),
        "needle_by_length": dict(zip(map(str, needle["lengths"]), map(statistics.mean, by_depth), strict=True)),
        "needle_by_depth": dict(zip(map(str, needle["lengths"]), by_depth, strict=True)),
        "needle_outcomes": needle["maps"][own].get("outcomes"),  # evaluations of earlier versions have none
        "ruler": evaluation["numbers"]["ruler"],
        "ruler_by_length": dict(
            zip(map(str, ruler["lengths"]), map(statistics.mean, zip(*tasks, strict=True)), strict=True)
        ),
        "errors": errors,
    }


def mean_of(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[float, float]:
    """Mean over seeds, and its standard error; 0 for one seed."""
    values = [float(row[key]) for row in rows]
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.mean(values), spread


def _cell(rows: Sequence[Mapping[str, Any]], key: str, show: Callable[[float], str]) -> str:
    mean, spread = mean_of(rows, key)
    return show(mean) + (f" ± {show(spread)}" if len(rows) > 1 else "")


def verdict(found: dict[str, Any]) -> str:
    """The comparison with full attention, after equal tokens and equal seconds, in words; the bar is that of the page
    benchmarks/measured/sparsify.md."""
    arms = found["arms"]
    if "full" not in arms:
        return "No arm of full attention was trained (--no-baseline), so nothing is claimed."
    seeds = len(arms["sparse"])
    trained = {"full": "on the same tokens", "equal-seconds": "for as many seconds"}
    compared = [_against(arms["sparse"], arms[arm], how) for arm, how in trained.items() if arm in arms]
    over = "These are means over" if seeds > 1 else "This is"
    return " ".join([*compared, f"{over} {seeds} seed{'s' * (seeds > 1)}{'; a claim takes three' * (seeds < 3)}."])


def _against(sparse: Sequence[Mapping[str, Any]], full: Sequence[Mapping[str, Any]], trained: str) -> str:
    """The bar, against an arm of full attention."""
    found, there = (mean_of(arm, "needle")[0] for arm in (sparse, full))
    trailing, ruler = (mean_of(sparse, key)[0] - mean_of(full, key)[0] for key in ("trailing", "ruler"))
    kept = found / there if there else 0.0
    holds = kept >= BAR["needle"] and trailing <= BAR["trailing"] and ruler >= -BAR["ruler"]
    return (
        f"Sparse attention finds {found:.3f} of the needles, and full attention, trained {trained}, {there:.3f}. The "
        f"sparse arm's trailing loss is {abs(trailing):.4f} nats {_side(trailing)} full attention's, its RULER "
        f"{abs(100 * ruler):.1f} points {_side(ruler)}. The bar (0.95 of the needles, 0.01 nats, 2 points) is "
        f"{'met' if holds else 'not met' if there else 'not met: full attention finds no needle to compare with'}."
    )


def _side(difference: float) -> str:
    return "above" if difference > 0 else "below"


def tables(found: dict[str, Any]) -> list[Table]:
    """Tables of a summary, in order."""
    arms = found["arms"]
    return [_comparison(arms), _errors(arms), _oracle(found["oracle"]), _candidates(found["calibration"]), _time(found)]


def _comparison(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    lengths = [*arms["sparse"][0]["needle_by_length"]]
    head = ["", "trailing loss", "with full attention"]
    head += [f"needle {format_count(int(length), 1024)}" for length in lengths]
    head += ["RULER", *(f"RULER {format_count(int(length), 1024)}" for length in arms["sparse"][0]["ruler_by_length"])]
    rows = []
    for arm, of_seeds in arms.items():
        flat = [
            {
                **one,
                "on_full": one["trailing"] if one["trailing_full"] is None else one["trailing_full"],
                **{f"needle {length}": score for length, score in one["needle_by_length"].items()},
                **{f"ruler {length}": score for length, score in one["ruler_by_length"].items()},
            }
            for one in of_seeds
        ]
        keys = [*(f"needle {length}" for length in lengths), "ruler"]
        keys += [f"ruler {length}" for length in of_seeds[0]["ruler_by_length"]]
        losses = [_cell(flat, key, "{:.4f}".format) for key in ("trailing", "on_full")]
        rows.append([arm, *losses, *(_cell(flat, key, "{:.3f}".format) for key in keys)])
    note = "Means over seeds, with standard errors where there are several; with full attention: on the same weights."
    return Table("Sparse and full attention after equal tokens", note, head, rows)


def _errors(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Errors of the trained sparse arm, seed by seed."""
    names = ("budget", "selector", "weights")
    rows = [[f"seed {one['seed']}", *(_pair(one["errors"].get(name)) for name in names)] for one in arms["sparse"]]
    note = (
        "Nats of trailing loss, above 0: worse. Budget: the ideal selection against full attention; selector: the "
        "arm's own selection, if it has that size, against the ideal one; weights: full attention on these weights "
        "against the arm of full attention."
    )
    return Table("Cost of budget, selector and weights in the sparse arm", note, ["", *names], rows)


def _oracle(oracle: dict[str, Any]) -> Table:
    shares = [*oracle["full"]]
    head = ["selection", "loss: budget", "loss: MoBA's gate"]
    head += [f"{share}: {name}" for share in shares for name in ("budget", "gate")]
    rows = []
    for budget in oracle["budgets"]:
        cells = [_pair(budget["loss"].get(name)) for name in ("budget", "selector")]
        scores = [budget["scores"][share].get(name) for share in shares for name in ("budget", "selector")]
        rows.append([budget["label"], *cells, *("–" if score is None else f"{score:+.3f}" for score in scores)])
    note = (
        "Before the arms are trained, with every layer sparse: what the best selection of this size loses, and what "
        "MoBA's gate adds."
    )
    return Table("What the budget costs", note, head, rows)


def _candidates(calibration: dict[str, Any]) -> Table:
    rows = [
        [
            one["name"],
            "all" if one["name"] == "full" else str(one["layers"]),
            f"{one['trailing']:.4f}",
            _score(one.get("answers")),
        ]
        for one in calibration["candidates"]
    ]
    note = "Layers that each criterion keeps full, and the loss with the ideal selection in all others."
    return Table("Which layers stay full", note, ["criterion", "layers", "trailing loss", "loss of needles"], rows)


def _time(found: dict[str, Any]) -> Table:
    rows = [
        [
            arm,
            format_count(mean_of(of_seeds, "tokens")[0]),
            format_duration(mean_of(of_seeds, "train_s")[0]),
            format_count(mean_of(of_seeds, "tokens_per_s")[0]),
        ]
        for arm, of_seeds in found["arms"].items()
    ]
    rows += [[name, "", format_duration(seconds), ""] for name, seconds in found["seconds"].items()]
    note = "Steps of training alone for an arm; then each step of this command as a whole, from its start to its end."
    return Table("Time", note, ["", "tokens", "time", "tokens/s"], rows)


def _pair(pair: Sequence[float | None] | None) -> str:
    return format_difference(*pair or (None, None))


def _score(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _use(request: Request, output: Path, exported: bool) -> list[str]:
    """Commands that use the model."""
    run = output / "runs" / "sparse-1"
    model = output / "model"
    loaded = f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{model}', "
    return [
        *([f'{loaded}trust_remote_code=True)"'] if exported else []),
        f"moba-train generate {model if exported else run} --prompt '...'",
        f"moba-train eval {run} --tasks needle --data {request.validation[0]}",
        f"moba-train report {run}",
    ]
