"""Charts of the evaluation `oracle`: what each error costs, budget by budget."""

from collections.abc import Sequence
from typing import Any

from moba_train.tools.report.chart import Chart, Shown, Trace, last_results, palette, text
from moba_train.tools.report.history import Result

_ERRORS = {
    "budget": "budget: the ideal selection against full attention",
    "selector": "selector: MoBA's gate against the ideal selection",
    "weights": "weights: against weights trained with full attention",
}


def oracle_charts(runs: Sequence[Shown]) -> list[Chart]:
    """The last result of every run: errors in trailing loss, and in each share of right answers, as bars."""
    return [chart for run, result in last_results(runs, "oracle") for chart in _charts(run, result)]


def _charts(run: Shown, result: Result) -> list[Chart]:
    budgets = result.data["budgets"]
    weights = result.data["weights"]
    labels = [text(budget["label"]) for budget in budgets]
    losses = {name: [budget["loss"].get(name) for budget in budgets] for name in _ERRORS}
    if weights is not None:
        losses["weights"] = [weights["loss"]] * len(budgets)
    means = {name: [pair and pair[0] for pair in pairs] for name, pairs in losses.items()}
    errors = {name: [pair and pair[1] for pair in pairs] for name, pairs in losses.items()}
    sequences = result.data["sequences"]
    length = result.data["seq_len"]
    note = (
        f"Trailing loss at {length:,} tokens, {sequences} sequences; whiskers: one standard error of paired sequences."
    )
    charts = [_bars(run, "loss", "What sparse attention costs", note, labels, means, errors)]
    for share in budgets[0]["scores"]:
        lost = {name: [budget["scores"][share].get(name) for budget in budgets] for name in _ERRORS}
        if weights is not None:
            lost["weights"] = [weights["scores"].get(share)] * len(budgets)
        full = result.data["attentions"]["full"]["scores"][share]
        note = f"Share of right answers that each error costs; full attention gives {full:.2f}."
        charts.append(
            _bars(run, share.replace(" ", "-"), f"What it costs in answers, {share}", note, labels, lost, None)
        )
    return charts


def _bars(
    run: Shown,
    key: str,
    title: str,
    note: str,
    labels: list[str],
    values: dict[str, list[Any]],
    errors: dict[str, list[Any]] | None,
) -> Chart:
    """A bar for each budget and error; errors that were not measured have none."""
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": run.called(_ERRORS[name]),
            "x": labels,
            "y": values[name],
            "marker": {"color": palette(role)},
            "meta": {"run": run.index},
            "yhoverformat": "+.4f",
            **({"error_y": {"type": "data", "array": errors[name], "thickness": 1}} if errors is not None else {}),
        }
        for role, name in enumerate(_ERRORS, 1)
        if any(value is not None for value in values[name])
    ]
    unit = "nats per token" if errors is not None else "share of answers lost"
    layout = {"barmode": "group", "xaxis": {"type": "category"}, "yaxis": {"title": unit}}
    return Chart(f"oracle-{run.index}-{text(key)}", run.titled(title), note, traces, layout, wide=True)
