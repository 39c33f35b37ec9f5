"""Charts of training: loss, throughput and MFU, learning rate, gradient norm, time of a step, data."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from moba_train.tools.report.chart import Chart, Shown, Trace, heatmap, length_names, palette, text, wrapped
from moba_train.tools.report.history import (
    Column,
    Record,
    axes,
    number,
    place_columns,
    smooth,
    value_at,
)

_EVENTS = (
    ("spike", "spike", {"symbol": "triangle-down", "size": 11, "color": "var(--bad)"}),
    ("rollback", "rollback", {"symbol": "arrow-left", "size": 12, "color": "var(--bad)"}),
    ("fault", "fault", {"symbol": "x", "size": 9, "color": "var(--bad)"}),
    ("resume", "restart", {"symbol": "circle-open", "size": 10, "color": "var(--ink)", "line": {"width": 2}}),
)

_LOADS = re.compile("expert_load_layer_([0-9]{1,6})")
_FEWEST_SMOOTHED = 60
"""Logged steps from which on the loss is also drawn smoothed."""


def loss_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Training loss of each step and smoothed, evaluated losses, stages, spikes, rollbacks and restarts."""
    traces: list[Trace] = []
    for run in runs:
        if run.history.has("loss"):
            traces += _losses(run)
        traces += _evaluated(run, "eval_loss", "validation loss", 2, "circle")
        traces += _evaluated(run, "trailing_loss", "trailing loss", 3, "diamond")
        traces += _evaluated(run, "trailing_loss_full", "trailing loss, full attention", 4, "diamond-open")
    for event in _EVENTS:
        points = [trace for run in runs for trace in _event_points(run, *event)]
        traces += points[:1] + [trace | {"showlegend": False} for trace in points[1:]]
    note = "Nats per token. Dotted lines: a stage begins."
    return _progress("loss", "Loss", note, traces, runs, {"yaxis": {"title": "loss"}}, wide=True, height=440)


def _losses(run: Shown) -> list[Trace]:
    loss = run.history.column("loss")
    if len(loss) < _FEWEST_SMOOTHED:
        return [run.line("training loss", loss, 1, width=2, yhoverformat=".4f")]
    faint: dict[str, Any] = {"visible": "legendonly"} if run.several else {}
    each = run.line("each step", loss, 1, width=1, opacity=0.35, yhoverformat=".4f", **faint)
    finite = np.isfinite(loss)
    places = place_columns(run.history)
    smoothed, *where = smooth(loss[finite], *(column[finite] for column in places.values()))
    curve = run.line("training loss", loss, 1, width=2.2, yhoverformat=".4f")
    curve |= {"y": smoothed, "axes": axes(run.history, dict(zip(places, where, strict=True)))}
    return [each, curve]


def _evaluated(run: Shown, name: str, label: str, role: int, symbol: str) -> list[Trace]:
    records = [event for event in run.history.events if math.isfinite(number(event, name))]
    if not records:
        return []
    values = np.array([number(record, name) for record in records])
    colour = run.colour(role)
    style = {"symbol": symbol, "size": 7, "color": colour}
    line = {"color": colour, "width": 1, "dash": "dot"}
    return [run.points(label, records, values, mode="lines+markers", marker=style, line=line, yhoverformat=".4f")]


def _event_points(run: Shown, event_type: str, label: str, marker: dict[str, Any]) -> list[Trace]:
    """Events as marks on the loss of their steps; the message appears on hovering."""
    records = run.history.of_type(event_type)
    heights = np.array([value_at(run.history, record["step"], "loss") for record in records])
    if not records or not np.isfinite(heights).any():
        return []
    messages = [f"<b>{label}, step {record['step']}</b><br>{wrapped(record.get('message', ''))}" for record in records]
    template = "%{text}<extra></extra>"
    points = run.points(label, records, heights, marker=marker, text=messages, hovertemplate=template)
    return [points | {"name": label, "legendgroup": label}]


def throughput_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Tokens per second."""
    traces = _lines(runs, ("tokens_per_s", "tokens/s", 1))
    layout = {"yaxis": {"title": "tokens/s", "rangemode": "tozero"}}
    return _progress("throughput", "Throughput", "All devices together.", traces, runs, layout)


def mfu_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Model FLOPs utilisation, by the keys that queries attend to and by the dense formula."""
    traces = _lines(runs, ("mfu", "real work", 1), ("mfu_dense", "dense formula", 2, "dot"))
    note = "Real work counts the keys that queries attend to; the dense formula counts whole sequences."
    layout = {"yaxis": {"title": "MFU", "rangemode": "tozero", "tickformat": ".0%"}}
    return _progress("mfu", "Model FLOPs utilisation", note, traces, runs, layout)


def learning_rate_chart(runs: Sequence[Shown]) -> list[Chart]:
    """The learning rate."""
    layout = {"yaxis": {"title": "learning rate", "rangemode": "tozero", "tickformat": "~g"}}
    return _progress("lr", "Learning rate", "", _lines(runs, ("lr", "learning rate", 1)), runs, layout)


def gradient_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Gradient norm before clipping, of all parameters and by attention kind."""
    traces = _lines(runs, ("grad_norm", "all parameters", 1))
    for run in runs:
        names = sorted({name for record in run.history.metrics for name in record if name.startswith("grad_norm_")})
        for role, name in enumerate(names, 2):
            label = f"{text(name.removeprefix('grad_norm_'))} layers"
            hidden: dict[str, Any] = {"visible": "legendonly"} if run.several else {}
            traces.append(run.line(label, run.history.column(name), role, width=1, dash="dot", **hidden))
    layout = {"yaxis": {"title": "gradient norm", "type": "log", "dtick": "D2", "tickformat": "~g"}}
    return _progress("grad-norm", "Gradient norm", "Before clipping.", traces, runs, layout)


def experts_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Load of the experts of a mixture, over the mean load."""
    traces = _lines(runs, ("expert_load_max", "busiest", 1), ("expert_load_min", "least busy", 2, "dot"))
    layout = {"yaxis": {"title": "load / mean", "rangemode": "tozero"}}
    return _progress("experts", "Load of the experts", "Of all layers, over all ranks.", traces, runs, layout)


def routers_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Entropy of the experts' load and the biases of their choice."""
    traces = _lines(
        runs, ("expert_load_entropy", "entropy of the load", 1), ("expert_bias_max", "largest bias", 2, "dot")
    )
    note = "Entropy over that of equal load, mean of all layers; the largest bias of a choice, if there are any."
    return _progress("routers", "Balance of the experts", note, traces, runs, {"yaxis": {"rangemode": "tozero"}})


def expert_maps(runs: Sequence[Shown]) -> list[Chart]:
    """Load of each expert of each layer, at the last step whose record has them."""
    last = ((run, next(_loads(reversed(run.history.metrics)), None)) for run in runs)
    return [_expert_map(run, *found) for run, found in last if found is not None]


def _loads(records: Iterable[Record]) -> Iterator[tuple[int, dict[int, list[float]]]]:
    """(step, percent of the mean load of each expert, by layer) of the records that have them."""
    for record in records:
        matches = ((_LOADS.fullmatch(name), values) for name, values in record.items() if isinstance(values, list))
        loads = {int(match[1]): values for match, values in matches if match is not None}
        numbers = [value for values in loads.values() for value in values]
        if numbers and all(isinstance(value, float) and math.isfinite(value) for value in numbers):
            yield record["step"], loads


def _expert_map(run: Shown, step: int, loads: dict[int, list[float]]) -> Chart:
    trace = {
        "y": [f"layer {layer}" for layer in sorted(loads)],
        "z": [[value / 100 for value in loads[layer]] for layer in sorted(loads)],
        "zmax": 2,
        "colorscale": [[0, "var(--bad)"], [0.5, "var(--card)"], [1, "var(--c1)"]],
        "hovertemplate": "%{y}, expert %{x}: %{z:.2f} of the mean<extra></extra>",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "len": 1},
    }
    note = f"Over the mean of its layer, in step {step:,}; colours end at 0 and 2."
    layout = {"xaxis": {"title": "expert", "type": "linear", "tickformat": "d"}}
    return heatmap(f"expert-load-{run.index}", run.titled("Load of each expert"), note, trace, layout, row=14)


def step_time_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Parts of the time of a step."""
    traces = _lines(
        runs,
        ("step_s", "step", 1),
        ("attention_s", "attention", 2, "dot"),
        ("data_s", "waiting for data", 3),
    )
    layout = {"yaxis": {"title": "seconds", "rangemode": "tozero"}}
    return _progress("step-time", "Time of a step", "", traces, runs, layout)


def memory_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Peak memory of the first rank's GPU."""
    layout = {"yaxis": {"title": "GiB", "rangemode": "tozero"}}
    traces = _lines(runs, ("memory_gib", "peak memory", 1))
    return _progress("memory", "GPU memory", "Peak of the first rank.", traces, runs, layout)


def padding_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Shares of the batches that carry loss, and that are padding."""
    traces = _lines(runs, ("loss_token_fraction", "carry loss", 1), ("padding_fraction", "padding", 2))
    layout = {"yaxis": {"title": "share of tokens", "tickformat": ".0%", "range": [-0.02, 1.02]}}
    return _progress("batches", "Batches", "Share of each batch's tokens.", traces, runs, layout)


def data_mix_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Share of each corpus in every stage's tokens, by the recipe's weights."""
    mixes = [(run.called(name), mix) for run in runs for name, mix in data_mix(run.history.recipe)]
    corpora = list(dict.fromkeys(path for _, mix in mixes for path in mix))
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": text(path),
            "y": [label for label, _ in mixes],
            "x": [mix.get(path, 0.0) for _, mix in mixes],
            "marker": {"color": palette(index)},
            "width": 0.5,
            "hovertemplate": "%{x:.1%}",
        }
        for index, path in enumerate(corpora, 1)
    ]
    if not traces:
        return []
    layout = {
        "barmode": "stack",
        "xaxis": {"tickformat": ".0%", "range": [0, 1], "title": "share of tokens"},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "hovermode": "closest",
        "showlegend": True,
    }
    note = "Share of each corpus in a stage's tokens, by the weights of the recipe."
    return [Chart("data-mix", "Data mix", note, traces, layout, height=max(340, 170 + 34 * len(mixes)))]


def document_lengths_chart(runs: Sequence[Shown]) -> list[Chart]:
    """Share of each stage's tokens by the length of their document, as the stage takes them from its corpora."""
    traces: list[Trace] = []
    for run in runs:
        for stage in run.history.stages:
            counted = tokens_by_length(stage)
            if total := sum(counted.values()):
                trace = {"x": [*counted], "y": [tokens / total for tokens in counted.values()], "mode": "lines+markers"}
                colour = {"color": palette(len(traces) + 1), "shape": "hvh"}
                trace |= {"type": "scatter", "name": run.called(text(stage["stage"])), "line": colour}
                traces.append(trace | {"hovertemplate": "up to %{x:,} tokens: %{y:.1%}"})
    if not traces:
        return []
    lengths = sorted({length for trace in traces for length in trace["x"]})
    ticks = {"tickvals": lengths, "ticktext": length_names(lengths)}
    layout = {
        "xaxis": {"type": "log", "title": "length of the document, tokens (up to)"} | ticks,
        "yaxis": {"title": "share of tokens", "tickformat": ".0%", "rangemode": "tozero"},
        "hovermode": "closest",
    }
    note = "Share of a stage's tokens by the length of their document: each value counts lengths above half of it."
    return [Chart("document-lengths", "Document lengths", note, traces, layout)]


def tokens_by_length(stage: Record) -> dict[int, float]:
    """Tokens by the upper bound of their document's length, of the record that began a stage; empty without them."""
    found = stage.get("tokens_by_length")
    if not isinstance(found, dict):
        return {}
    bounds = [bound for bound in found if bound.isdecimal() and len(bound) < 16]
    counted = {int(bound): number(found, bound) for bound in sorted(bounds, key=int)}
    return {bound: tokens for bound, tokens in counted.items() if 0 < tokens < math.inf}


def data_mix(recipe: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(stage, share of each corpus) by a recipe's weights; what is not a recipe's gives nothing."""
    data = recipe.get("data")
    common = data.get("train") if isinstance(data, dict) else None
    mixes = []
    for stage in recipe.get("stages") or ():
        weights: dict[str, float] = {}
        for source in stage.get("train") or common or ():
            path = str(source["path"])
            limits = (("from", source.get("min_length")), ("below", source.get("below_length")))
            lengths = [f"{word} {length}" for word, length in limits if length]
            name = f"{path} ({', '.join(lengths)} tokens)" if lengths else path
            weights[name] = weights.get(name, 0.0) + float(source.get("weight") or 1.0)
        total = sum(weights.values())
        if total > 0:
            mixes.append((text(stage["name"]), {path: weight / total for path, weight in weights.items()}))
    return mixes


def _lines(runs: Sequence[Shown], *curves: tuple[Any, ...]) -> list[Trace]:
    """A line for each (metric, label, role, dash) that a run has."""
    traces = []
    for run in runs:
        for name, label, role, *dash in curves:
            values: Column = run.history.column(name)
            if np.isfinite(values).any():
                traces.append(run.line(label, values, role, dash=dash[0] if dash else "solid", yhoverformat=".4~g"))
    return traces


def _progress(
    key: str, title: str, note: str, traces: list[Trace], runs: Sequence[Shown], layout: dict[str, Any], **more: Any
) -> list[Chart]:
    """A chart over the progress of the runs, with their stages; none without a curve."""
    if not traces:
        return []
    marks = [mark for run in runs for mark in run.stage_marks()]
    return [Chart(key, title, note, traces, layout, marks, progress=True, **more)]
