"""The model behind `plan --nodes` predicts what was measured, and the document shows it."""

import pytest
from guide import ROOT

from benchmarks.step_time import COMPARED, FITTED, STEPS, compare, fitted_once, loss_bytes, table
from moba_train.planning.rates import RATES


def test_every_measured_step_on_h200_is_predicted_within_15_percent() -> None:
    rows = compare()
    assert len(rows) == len(STEPS)
    assert sum(not row.measured.fit for row in rows) > 2 * sum(row.measured.fit for row in rows)
    assert {row.measured.gpus for row in rows} >= {1, 2}
    far = {f"{row.measured.file} {row.measured.row}": f"{row.error:+.1%}" for row in rows if abs(row.error) > 0.15}
    assert far == {}
    assert table(rows) in (ROOT / COMPARED).read_text(), f"python -m benchmarks.step_time --write {COMPARED}"


def test_the_rates_are_those_that_the_fit_finds() -> None:
    again = fitted_once(RATES)
    for name in FITTED:
        assert getattr(again, name) == pytest.approx(getattr(RATES, name), rel=0.02), name
    assert loss_bytes(RATES) == pytest.approx(RATES.loss_bytes, rel=0.02)
