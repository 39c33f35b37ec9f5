"""Pages of charts: `moba-train report`, and those of `eval`, `fit-scaling` and `moba-data stats`.

A page is one HTML file that is complete in itself. It holds its style sheet, its program, plotly.js (compressed) and
the data. Its content security policy lets it load nothing, and run only those two scripts, whatever a run's names and
messages contain.
"""

import base64
import dataclasses
import gzip
import hashlib
import importlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from moba_train.errors import LaunchError
from moba_train.output_files import write_atomically
from moba_train.tools.report import evaluation_charts as evaluation
from moba_train.tools.report import training_charts as training
from moba_train.tools.report.chart import Chart, Shown, as_json, shown
from moba_train.tools.report.facts import environment, events, facts, settings
from moba_train.tools.report.history import Axes, History, file_results, read_history
from moba_train.tools.report.sink import INSTALL

ChartMaker = Callable[[Sequence[Shown]], list[Chart]]

_LONG_CONTEXT: tuple[ChartMaker, ...] = (
    *(evaluation.position_chart, evaluation.gap_chart, evaluation.oracle_charts, evaluation.needle_maps),
    *(evaluation.task_charts, evaluation.lm_eval_charts, evaluation.selected_blocks, evaluation.gate_charts),
)
_TRAINING: tuple[ChartMaker, ...] = (
    *(training.loss_chart, training.throughput_chart, training.mfu_chart, training.learning_rate_chart),
    *(training.gradient_chart, training.experts_chart, training.routers_chart, training.expert_maps),
)
_SECTIONS: tuple[tuple[str, tuple[ChartMaker, ...]], ...] = (
    ("Training", _TRAINING),
    ("Long context", _LONG_CONTEXT),
    ("Data", (training.data_mix_chart, training.document_lengths_chart, training.padding_chart)),
    ("Machine", (training.step_time_chart, training.memory_chart)),
)

_ASSETS = Path(__file__).parent / "assets"


class Section(NamedTuple):
    """A heading and its charts."""

    title: str
    charts: list[Chart]


class Report(NamedTuple):
    """File of the page, and notices about its data."""

    path: Path
    notices: list[str]


def write_report(folders: Sequence[Path], output: Path | None = None) -> Report:
    """Write the page of the runs in `folders`.

    output  the file; None: `report.html` in the run's folder or, for several runs, in the working folder

    Raises UserError when a folder is no run's, or the page cannot be written.
    """
    histories = [read_history(folder) for folder in folders]
    _name_apart(histories)
    path = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    _write(path, render(histories, time.time()))
    return Report(path, _notices(histories))


def write_evaluation(content: dict[str, Any], folder: Path) -> Path:
    """Write the charts of a result of `moba-train eval` as `evaluation.html` into `folder`. Returns its path.

    Raises LaunchError when it cannot be written.
    """
    path = folder / "evaluation.html"
    history = History(folder, content["run"], results=[*file_results(content, "evaluation.json")])
    sections = [Section("", _charts(_LONG_CONTEXT, shown([history])))]
    _write(path, _page(history.name, sections, time.time(), notices=history.notices))
    return path


def write_charts(title: str, charts: list[Chart], path: Path) -> None:
    """Write a page with charts that are about no single run. Raises LaunchError when it cannot be written."""
    _write(path, _page(title, [Section("", _fill_rows(charts))], time.time()))


def _write(path: Path, page: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise LaunchError(f"{path}: the page cannot be written: {error.strerror or error}; set --output") from error


def render(histories: Sequence[History], now: float) -> str:
    """The page of these runs as HTML; `now`: seconds since the epoch."""
    runs = shown(histories)
    sections = [Section(title, _charts(makers, runs)) for title, makers in _SECTIONS]
    keys = settings([history.recipe for history in histories])
    return _page(
        " · ".join(history.name for history in histories),
        sections,
        now,
        axes={f"run-{run.index}": run.axes() for run in runs},
        runs=[(history, facts(history, now)) for history in histories],
        notices=_notices(histories),
        events=events(histories),
        settings=keys,
        differing=[key for key in keys if key.differs],
        environment=environment(histories),
    )


def _page(
    title: str, sections: Sequence[Section], now: float, axes: Mapping[str, Axes] | None = None, **parts: Any
) -> str:
    """The page as HTML. Without `runs` among the `parts` of the template, it has charts and notices only."""
    given = {"runs": [], "notices": [], "events": [], "settings": [], "differing": [], "environment": [], **parts}
    charts = [chart for section in sections for chart in section.charts]
    program, plotly = _asset("report.js"), _plotly()
    return filled(
        "report.html.j2",
        **given,
        title=title,
        sections=[section for section in sections if section.charts],
        progress=any(chart.progress for chart in charts),
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now)),
        program=program,
        policy=_policy(program, plotly),
        plotly=_packed(plotly),
        data=_data(charts, axes or {}),
    )


def filled(template: str, **parts: Any) -> str:
    """A template of assets/ with these parts, and with the style sheet as `styles`."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return templates.get_template(template).render(**parts, styles=_asset("report.css"))


def _charts(makers: Sequence[ChartMaker], runs: Sequence[Shown]) -> list[Chart]:
    """The charts that have something to show. Data that a chart cannot draw is a notice: it may be damaged."""
    charts = []
    for maker in makers:
        try:
            charts += maker(runs)
        except Exception as error:  # values of any type can be in the files
            what = maker.__name__.removesuffix("_chart").replace("_", " ")
            runs[0].history.notices.append(f"the chart of {what} cannot be drawn: {error!r}")
    return _fill_rows(charts)


def _fill_rows(charts: list[Chart]) -> list[Chart]:
    """Charts stand two in a row; one that would stand alone is made wide."""
    narrow = [chart for chart in charts if not chart.wide]
    if len(narrow) % 2:
        charts = [dataclasses.replace(chart, wide=chart.wide or chart is narrow[-1]) for chart in charts]
    return charts


def _notices(histories: Sequence[History]) -> list[str]:
    return [
        f"{history.name}: {notice}" if len(histories) > 1 else notice
        for history in histories
        for notice in history.notices
    ]


def _name_apart(histories: Sequence[History]) -> None:
    """Give runs of one name the names of their folders, or a number, in addition."""
    for key in ("folder", "number"):
        counts = Counter(history.name for history in histories)
        for index, history in enumerate(histories, 1):
            if counts[history.name] > 1:
                history.name += f" ({history.folder})" if key == "folder" else f" #{index}"


def _data(charts: Sequence[Chart], axes: Mapping[str, Axes]) -> str:
    """The charts, and the axes that they share by name, as JSON that can stand inside a script element."""
    drawn = ("key", "traces", "layout", "progress", "height")
    shown = [{name: getattr(chart, name) for name in drawn} | {"marks": [*map(vars, chart.marks)]} for chart in charts]
    text = json.dumps(as_json({"axes": axes, "charts": shown}), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Source of plotly.js, from the Python package. Raises LaunchError when that is missing."""
    try:
        return str(importlib.import_module("plotly.offline").get_plotlyjs())
    except ImportError as error:
        raise LaunchError(f"the package plotly cannot be imported ({error}): {INSTALL}") from error


@cache
def _packed(script: str) -> str:
    """A script as base64 of gzip: a third of its size. The same text always gives the same bytes."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _policy(*scripts: str) -> str:
    """A content security policy that allows these scripts alone, and no connection."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; "
        "base-uri 'none'"
    )
