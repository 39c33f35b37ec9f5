"""The plot of the attention benchmark: drawn from results, readable on light and dark, never a wrong claim."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.attention_plot import COLOURS, PLOT, draw, extrapolated, floor, measured
from benchmarks.attention_table import RESULT
from benchmarks.plotting import GREY, stamp


def some_results(path: Path, *rows: tuple[str, dict[str, float]]) -> Path:
    results: list[dict[str, Any]] = [
        {"row": row, "columns": {name: {"both_ms": {"median": ms}} for name, ms in times.items()}}
        for row, times in rows
    ]
    path.write_text(json.dumps({"device": "NVIDIA H200", "results": results}))
    return path


ROWS = (
    ("8K:512/3", {"auto": 2.0, "cudnn": 4.0}),
    ("32K:512/3", {"auto": 6.0, "cudnn": 56.0, "flash2": 94.0}),
    ("32K:512/3,routing=sink", {"auto": 66.0}),
    ("128K:4096/12", {"auto": 690.0}),
)


def test_curves_hold_the_measured_medians_of_plain_rows(tmp_path: Path) -> None:
    curves = measured(json.loads(some_results(tmp_path / "r.json", *ROWS).read_text()))
    assert curves["512/3"] == [(8192, 2.0), (32768, 6.0)]
    assert curves["dense, cuDNN"] == [(8192, 4.0), (32768, 56.0)]
    assert curves["dense, FlashAttention-2"] == [(32768, 94.0)]
    assert "128/8" not in curves


def test_dense_curves_go_on_from_the_longest_measurement_by_the_square() -> None:
    assert extrapolated([(8192, 4.0), (2**18, 100.0)]) == [(2**18, 100.0), (2**19, 400.0), (2**20, 1600.0)]


def test_the_ideal_is_below_every_bar() -> None:
    times = dict(floor("4096/12", 2**17))
    assert 0.4 * 690 < times[2**17] < 690
    assert times[2**20] == pytest.approx(1003 + 2504, rel=0.01)  # design table, ideal ms


@pytest.mark.parametrize("source", ["small", "committed"])
def test_a_plot_is_drawn(source: str, tmp_path: Path) -> None:
    path = RESULT if source == "committed" else some_results(tmp_path / "r.json", *ROWS)
    draw(path, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    words = " ".join(element.text or "" for element in ElementTree.fromstring(text).iter() if element.text)
    assert all(part in words for part in ("MoBA 512/3", "dense, cuDNN", "measured", "not measured", "128K"))
    assert stamp(path.read_text()) in text
    assert len(text) < 60_000
    draw(path, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text, "the same results give the same plot"


def test_the_committed_plot_shows_the_committed_results() -> None:
    assert stamp(RESULT.read_text()) in PLOT.read_text(), "run python -m benchmarks.attention_plot"


def test_results_without_a_curve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of 128/8"):
        draw(some_results(tmp_path / "r.json", ROWS[2]), tmp_path / "plot.svg")


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117"])
def test_plots_can_be_read_on_light_and_on_dark(background: str) -> None:
    figure = (PLOT.parent / "moba-kernels.svg").read_text()
    colours = {GREY, *COLOURS.values(), *re.findall(r"#[0-9a-f]{6}", figure)}
    assert len(colours) > 5
    assert {colour: ratio for colour in colours if (ratio := contrast(colour, background)) < 3} == {}


def test_the_figure_of_the_kernels_is_well_formed() -> None:
    assert ElementTree.parse(PLOT.parent / "moba-kernels.svg").getroot().tag.endswith("svg")
