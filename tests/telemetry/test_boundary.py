"""The change of the loss at the boundary between two stages."""

import json
from dataclasses import asdict

from moba_train.run.progress import STEPS, Boundary


def test_the_last_losses_before_are_compared_once_with_the_first_after() -> None:
    boundary = Boundary()
    assert not any(boundary.observe(9.0 if step < 5 else 3.0) for step in range(5 + STEPS))
    boundary.begin_stage()
    found = []
    for step in range(3 * STEPS):
        boundary = Boundary(**json.loads(json.dumps(asdict(boundary))))  # as a resumed run would have it
        found.append(boundary.observe(3.5 if step < STEPS else 1.0))
    assert found == [None] * (STEPS - 1) + [(3.0, 3.5)] + [None] * (2 * STEPS)


def test_a_short_stage_is_compared_with_the_losses_it_has() -> None:
    boundary = Boundary()
    assert boundary.compare() is None
    for loss in (2.0, 4.0):
        boundary.observe(loss)
    boundary.begin_stage()
    boundary.observe(5.0)
    assert boundary.compare() == (3.0, 5.0)
    assert boundary.compare() is None
    boundary.begin_stage()
    boundary.observe(6.0)
    assert boundary.compare() == (5.0, 6.0)


def test_a_stage_whose_steps_were_all_skipped_is_passed_over() -> None:
    boundary = Boundary()
    boundary.observe(2.0)
    boundary.begin_stage()
    assert boundary.compare() is None
    boundary.begin_stage()
    boundary.observe(5.0)
    assert boundary.compare() == (2.0, 5.0)
