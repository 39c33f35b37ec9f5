"""The timeline of context parallelism, from a trace as the profiler writes it."""

import pytest
from matplotlib.figure import Figure

from benchmarks.context_timeline import bars, covered, draw, joined

TRACE = {
    "traceEvents": [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 900},
        {"cat": "kernel", "name": "forward_history", "ts": 2000, "dur": 1000},
        {"cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 1000, "dur": 1500},
        {"cat": "kernel", "name": "dq_diagonal", "ts": 3010, "dur": 90},
    ]
}


def test_kernels_are_told_apart_and_counted_from_the_first() -> None:
    assert bars(TRACE) == {"attention": [(1.0, 1.0), (2.01, 0.09)], "communication": [(0.0, 1.5)]}


def test_neighbours_are_joined() -> None:
    assert joined([(0.0, 1.0), (1.01, 0.5), (3.0, 1.0)]) == [(0.0, pytest.approx(1.51)), (3.0, 1.0)]


def test_the_hidden_share_is_the_time_under_the_others() -> None:
    found = bars(TRACE)
    assert covered(found["communication"], found["attention"]) == pytest.approx(1 / 3)
    assert covered([], found["attention"]) == 1.0


def test_a_strip_is_drawn_for_each_transport() -> None:
    result = {"transport": "ring", "attention": "dense", "tokens": 2**17, "hidden_share": 0.5, "bars": bars(TRACE)}
    figure = Figure()
    draw(figure, {"settings": {"ranks": 4}, "results": [result, {**result, "transport": "ulysses"}]})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ring", "ulysses"]
    assert len(axes.collections) == 2 * len(bars(TRACE))
