"""The plot of the attention benchmark: what is measured, continued and ideal."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from benchmarks.attention_plot import draw, extrapolated, floor, measured


def some_results(*rows: tuple[str, dict[str, float]]) -> dict[str, Any]:
    results: list[dict[str, Any]] = [
        {"row": row, "columns": {name: {"both_ms": {"median": ms}} for name, ms in times.items()}}
        for row, times in rows
    ]
    return {"results": results}


ROWS = (
    ("8K:512/3", {"auto": 2.0, "cudnn": 4.0}),
    ("32K:512/3", {"auto": 6.0, "cudnn": 56.0, "flash2": 94.0}),
    ("32K:512/3,routing=sink", {"auto": 66.0}),
    ("128K:4096/12", {"auto": 690.0}),
)


def test_curves_hold_the_measured_medians_of_plain_rows() -> None:
    curves = measured(some_results(*ROWS))
    assert curves["512/3"] == [(8192, 2.0), (32768, 6.0)]
    assert curves["dense, cuDNN"] == [(8192, 4.0), (32768, 56.0)]
    assert curves["dense, FlashAttention-2"] == [(32768, 94.0)]
    assert "128/8" not in curves


def test_dense_curves_go_on_from_the_longest_measurement_by_the_square() -> None:
    assert extrapolated([(8192, 4.0), (2**18, 100.0)]) == [(2**18, 100.0), (2**19, 400.0), (2**20, 1600.0)]


def test_the_ideal_is_below_every_bar() -> None:
    times = dict(floor("4096/12", [2**17, 2**20]))
    assert 0.4 * 690 < times[2**17] < 690
    assert times[2**20] == pytest.approx(1003 + 2504, rel=0.01)  # design table, ideal ms


def test_results_without_a_curve_are_refused() -> None:
    with pytest.raises(ValueError, match="no row of 128/8"):
        draw(Figure(), some_results(ROWS[2]))
