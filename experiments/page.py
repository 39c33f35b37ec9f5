"""The section of a figure in docs/science.md and its picture, made from the result file alone, and the table of all
figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.plotting import STYLE, stamp
from benchmarks.record import insert_tables, markdown
from experiments.figure import Figure, Finding, Result, key_of
from experiments.results import read_results

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "science.md"
RESULTS = Path(__file__).parent / "results"


def result_file(figure: Figure) -> Path:
    """Where the results that the figure is drawn from are kept."""
    return RESULTS / f"{figure.source or figure.name}.json"


def command(figure: Figure) -> str:
    """What runs its arms."""
    return f"python -m experiments {figure.source or figure.name} --corpus data/long --gpus 2"


def marker(figure: Figure) -> str:
    """The line of the page behind which the figure's section begins."""
    return f"<!-- figure: {figure.name} -->"


def section(figure: Figure, path: Path) -> str:
    """The figure's section, from its result file where there is one."""
    parts = [f"**Published.** {figure.claim}", f"**Here.** {figure.setup}"]
    if not path.exists():
        missing = (
            f"**No result yet.** It takes GPUs: `{command(figure)}`, then `python -m experiments {figure.name} --plot`."
        )
        return "\n\n".join([*parts, missing])
    content = json.loads(path.read_text())
    finding = figure.find(content["results"]["arms"])
    where = f"../experiments/results/{path.name}"
    if finding.is_begun:
        parts += [f"![{figure.title}](science-{figure.name}.svg)", markdown(finding.rows)]
    parts += [f"- {line}" for line in _sentences(finding)]
    if not finding.verdicts and not figure.found:
        parts.append("The arms that are finished do not suffice for a verdict.")
    if figure.found:
        parts.append("\n".join(["**Found.**", "", *(f"- {statement}" for statement in figure.found)]))
    parts.append(f"[Result file]({where}), {_arms(content)}; last call: `{content['command']}`")
    return "\n\n".join(parts)


def _arms(content: dict[str, Any]) -> str:
    results: list[Result] = content["results"]["arms"]
    arms = f"{len(results)} arms on {', '.join(sorted({str(result['device']) for result in results}))}"
    if all({"train", "validation"} <= result["recipe"].get("data", {}).keys() for result in results):
        return f"{arms}, documents of their own"
    tokens = content["settings"]["corpus"]["training_tokens"]
    most = max(result["tokens"] for result in results)
    read = f", which the longest arm reads {most / tokens:.1f} times"
    return f"{arms}, corpus of {tokens / 1e6:.0f}M tokens{read if most > tokens else ''}"


OVERVIEW = "<!-- all figures -->"
"""The line of the page behind which the table of all figures begins."""


def overview(figures: Mapping[str, Figure]) -> str:
    """A table of all figures: how many of their arms there are, and what came out."""
    rows = [["figure", "arms finished", "result so far"]]
    for figure in figures.values():
        trained = figures[figure.source] if figure.source else figure
        results = read_results(result_file(figure))
        arms = [arm for seed in trained.seeds for arm in trained.arms(seed, quick=False)]
        arms = [arm for arm in arms if not trained.refusal(arm, results, quick=False)]
        keys = {key_of(result) for result in results}
        finished = sum(arm.key in keys for arm in arms)
        rows.append([figure.title, f"{finished} of {len(arms)}", figure.result or "none"])
    return markdown(rows)


def write_overview(figures: Mapping[str, Figure], page: Path = PAGE) -> None:
    """Bring the page's table of all figures up to date."""
    page.write_text(insert_tables(page.read_text(), {OVERVIEW: overview(figures)}))


def write_section(figure: Figure, page: Path = PAGE, results: Path | None = None) -> None:
    """Bring the page's section of the figure up to date with its result file."""
    text = insert_tables(page.read_text(), {marker(figure): section(figure, results or result_file(figure))})
    page.write_text(text)


def draw(figure: Figure, source: Path, plot: Path) -> None:
    """Draw the result file `source` as an SVG; equal results give equal bytes. Raises ValueError when it has no arm."""
    import matplotlib.pyplot as plt

    results = read_results(source)
    if not results:
        raise ValueError(f"{source} holds no arm to draw; run {command(figure)}")
    with plt.rc_context(STYLE):
        canvas = plt.figure(figsize=(9, 3.6), layout="constrained")
        figure.draw(results, canvas)
        metadata = {"Description": stamp(source.read_text()), "Date": None}
        canvas.savefig(plot, format="svg", transparent=True, metadata=metadata)
        plt.close(canvas)


def summary_lines(figure: Figure, results: list[Result]) -> list[str]:
    """What a program prints last: the table and a line for each verdict."""
    finding = figure.find(results)
    return [markdown(finding.rows), *_sentences(finding)]


def _sentences(finding: Finding) -> list[str]:
    """Verdicts, behind what they leave out."""
    return [*(f"Left out: {one}." for one in finding.left_out), *map(str, finding.verdicts)]
