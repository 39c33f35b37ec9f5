"""The model behind `plan --nodes` predicts what was measured, and the document shows it."""

import pytest
from guide import ROOT

from benchmarks.step_time import COMPARED, FITTED, RESULTS, STEPS, compare, fitted_once, loss_bytes, rows_of, table
from moba_train.planning.rates import RATES


def test_every_measured_step_on_h200_is_predicted_within_15_percent() -> None:
    rows = compare()
    assert len(rows) == len(STEPS)
    assert sum(not row.measured.fit for row in rows) > 2 * sum(row.measured.fit for row in rows)
    assert {row.measured.gpus for row in rows} >= {1, 2}
    far = {f"{row.measured.file} {row.measured.row}": f"{row.error:+.1%}" for row in rows if abs(row.error) > 0.15}
    assert far == {}
    assert table(rows) in (ROOT / COMPARED).read_text(), f"python -m benchmarks.step_time --write {COMPARED}"


def test_any_result_of_training_can_be_compared() -> None:
    """The rows of a file name their own options; what they leave out is in its settings."""
    file = RESULTS / "training-8b-h200-x2.json"
    rows = {row.measured.keys: row for row in compare(steps=rows_of(file))}
    listed = {row.measured.keys: row for row in compare() if row.measured.file == file.name}
    assert rows.keys() == listed.keys()
    for keys, row in rows.items():
        assert (row.seconds, row.predicted.time) == (listed[keys].seconds, listed[keys].predicted.time)


def test_the_rates_are_those_that_the_fit_finds() -> None:
    again = fitted_once(RATES)
    for name in FITTED:
        assert getattr(again, name) == pytest.approx(getattr(RATES, name), rel=0.02), name
    assert loss_bytes(RATES) == pytest.approx(RATES.loss_bytes, rel=0.02)
