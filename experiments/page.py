"""The section of a figure in REPORT.md and its picture, made from the result file alone."""

import json
from pathlib import Path
from typing import Any

from benchmarks.plotting import saved
from benchmarks.record import insert_tables, markdown
from experiments.figure import Figure, Finding, Result, key_of
from experiments.registry import trained
from experiments.results import read_results

FOLDER = Path(__file__).parent
PAGE = FOLDER / "REPORT.md"


def result_file(figure: Figure) -> Path:
    """Where the results that the figure is drawn from are kept."""
    return FOLDER / "results" / f"{trained(figure).name}.json"


def plot_file(figure: Figure) -> Path:
    """Where the picture is kept."""
    return FOLDER / "plots" / f"{figure.name}.svg"


def command(figure: Figure) -> str:
    """What runs its arms."""
    corpus = f"--corpus {figure.corpus} " if figure.corpus else ""
    return f"python -m experiments {trained(figure).name} {corpus}--gpus 2"


def marker(figure: Figure) -> str:
    """The line of the page behind which stands what its result file says."""
    return f"<!-- figure: {figure.name} -->"


def section(figure: Figure, path: Path) -> str:
    """Picture, table and verdicts of the figure, from its result file where there is one."""
    if not path.exists():
        return (
            f"**No result yet.** It takes GPUs: `{command(figure)}`, then `python -m experiments {figure.name} --plot`."
        )
    content = json.loads(path.read_text())
    results = content["results"]["arms"]
    finding = figure.find(results)
    parts = [f"![{figure.title}](plots/{figure.name}.svg)", markdown(finding.rows)] if finding.is_begun else []
    if sentences := _sentences(finding):
        parts.append("\n".join(f"- {line}" for line in sentences))
    arms = f"{progress(figure, results)} on {_origin(content)}"
    parts.append(f"[Result file](results/{path.name}): {arms}; last call: `{content['command']}`")
    return "\n\n".join(parts)


def progress(figure: Figure, results: list[Result]) -> str:
    """How many of the arms that make the figure complete have a result; arms that it refuses do not count."""
    arms = [arm for seed in trained(figure).seeds for arm in trained(figure).arms(seed, quick=False)]
    arms = [arm for arm in arms if not trained(figure).refusal(arm, results, quick=False)]
    keys = {key_of(result) for result in results}
    return f"{sum(arm.key in keys for arm in arms)} of {len(arms)} arms"


def _origin(content: dict[str, Any]) -> str:
    """Devices and corpus of the arms in a result file."""
    results: list[Result] = content["results"]["arms"]
    devices = ", ".join(sorted({str(result["device"]) for result in results}))
    if all({"train", "validation"} <= result["recipe"].get("data", {}).keys() for result in results):
        return f"{devices}, documents of their own"
    tokens = content["settings"]["corpus"]["training_tokens"]
    most = max(result["tokens"] for result in results)
    read = f", which the longest arm reads {most / tokens:.1f} times"
    return f"{devices}, corpus of {tokens / 1e6:.0f}M tokens{read if most > tokens else ''}"


def write_section(figure: Figure) -> None:
    """Bring the page's section of the figure up to date with its result file."""
    PAGE.write_text(insert_tables(PAGE.read_text(), {marker(figure): section(figure, result_file(figure))}))


def draw(figure: Figure, source: Path, plot: Path) -> None:
    """Draw the result file `source` as an SVG; equal results give equal bytes. Raises ValueError when it has no arm."""
    results = read_results(source)
    if not results:
        raise ValueError(f"{source} holds no arm to draw; run {command(figure)}")
    with saved(plot, source.read_text(), figure.height) as canvas:
        figure.draw(results, canvas)


def summary_lines(figure: Figure, results: list[Result]) -> list[str]:
    """What a program prints last: the table and a line for each verdict."""
    finding = figure.find(results)
    return [markdown(finding.rows), *_sentences(finding)]


def _sentences(finding: Finding) -> list[str]:
    """Verdicts, behind what they leave out."""
    return [*(f"Left out: {one}." for one in finding.left_out), *map(str, finding.verdicts)]
