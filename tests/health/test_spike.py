"""The spike detector alarms when it should and is quiet when it should."""

import json
import math
import random

import pytest

from moba_train.errors import CheckpointError
from moba_train.health.spike import RECOVERY_STEPS, SpikeDetector


def curve(steps: int, seed: int = 0) -> list[tuple[float, float]]:
    """Loss and gradient norm of a run from scratch: a power law with batch noise; a heavier-tailed gradient norm."""
    noise = random.Random(seed)
    return [
        (
            2.0 + 9.0 * (step + 10) ** -0.35 + noise.gauss(0, 0.02),
            (0.3 + 20 / (step + 10)) * noise.lognormvariate(0, 0.15),
        )
        for step in range(steps)
    ]


def run(detector: SpikeDetector, values: list[tuple[float, float]], start: int = 0) -> list[str]:
    return [detector.observe(start + i, *pair).level for i, pair in enumerate(values)]


@pytest.mark.parametrize("seed", range(3))
def test_no_alarm_on_a_clean_run(seed: int) -> None:
    assert set(run(SpikeDetector(128, 6.0), curve(5000, seed))) == {"ok"}


def test_no_alarm_on_a_flat_curve() -> None:
    flat = [(2.0 + 1e-6 * (step % 7 == 0), 0.5 + 1e-6 * (step % 5 == 0)) for step in range(300)]
    assert set(run(SpikeDetector(128, 6.0), flat)) == {"ok"}


@pytest.mark.parametrize(("d_loss", "factor", "name"), [(1.0, 1.0, "loss"), (0.0, 10.0, "gradient norm")])
def test_spikes_are_flagged_and_do_not_dull_the_detector(d_loss: float, factor: float, name: str) -> None:
    values = curve(600)
    spikes = {300, 301, 302, 450}
    spiked = [(x + d_loss, g * factor) if i in spikes else (x, g) for i, (x, g) in enumerate(values)]
    detector = SpikeDetector(128, 6.0)
    reports = [detector.observe(i, *pair) for i, pair in enumerate(spiked)]

    assert {i for i, report in enumerate(reports) if report.level == "warn"} == spikes
    assert all(report.level == "ok" for i, report in enumerate(reports) if i not in spikes)
    assert {i for i, report in enumerate(reports) if report.continues} == {301, 302, 303, 451}
    assert f"step 300: {name}" in reports[300].message
    assert max(reports[300].z_loss, reports[300].z_grad) > 6.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_a_number_is_fatal_from_the_first_step(bad: float) -> None:
    detector = SpikeDetector(128, 6.0)
    reports = [detector.observe(0, bad, 1.0), detector.observe(1, 1.0, bad)]
    assert [(report.level, report.continues) for report in reports] == [("fatal", False), ("fatal", True)]
    assert set(run(detector, curve(200))) == {"ok"}


def test_a_window_shorter_than_the_warm_up_judges_once_it_is_full() -> None:
    levels = run(SpikeDetector(8, 6.0), [(2.0, 0.5)] * 8 + [(3.0, 0.5)])
    assert levels == ["ok"] * 8 + ["warn"]


def test_a_loss_that_does_not_come_back_is_an_error_once() -> None:
    values = [(x + (i >= 300) * 1.0, g) for i, (x, g) in enumerate(curve(600))]
    levels = run(SpikeDetector(128, 6.0), values)
    assert levels[300:350] == ["warn"] * (RECOVERY_STEPS - 1) + ["error"]
    assert set(levels[350:]) == {"ok"}, "the new level is the new baseline"


@pytest.mark.parametrize(("sigmas", "errors"), [(2, []), (4, [249])])
def test_recovered_is_a_loss_within_three_standard_deviations_of_before(sigmas: int, errors: list[int]) -> None:
    """Two spikes, and between them a loss that is too high but not flagged: the window takes it up, the limit stays."""
    noise = random.Random(0)
    losses = [2.0 + noise.gauss(0, 0.02) for _ in range(200)] + 2 * ([3.0] + [2.0 + sigmas * 0.02] * 24)
    levels = run(SpikeDetector(128, 6.0), [(loss, 0.5) for loss in losses])
    assert [step for step, level in enumerate(levels) if level == "warn"] == [200, 225]
    assert [step for step, level in enumerate(levels) if level == "error"] == errors


def test_a_loss_that_comes_back_is_no_error() -> None:
    values = [(x + (300 <= i < 340 or 400 <= i < 440) * 1.0, g) for i, (x, g) in enumerate(curve(600))]
    assert "error" not in run(SpikeDetector(128, 6.0), values)


def test_rebaseline_accepts_a_new_level() -> None:
    jump = [(x + 1.0, g * 5) for x, g in curve(400)[200:]]
    detector = SpikeDetector(128, 6.0)
    run(detector, curve(200))
    assert detector.observe(200, *jump[0]).level == "warn"
    detector.rebaseline()
    assert set(run(detector, jump)) == {"ok"}


@pytest.mark.parametrize(
    ("values", "level"),
    [((2000.0, 0.5), "warn"), ((2.0, 500.0), "warn"), ((8.0, 0.5), "ok"), ((2.0, 8.0), "ok")],
    ids=["loss x 1000", "gradient norm x 1000", "other data", "a smaller batch"],
)
@pytest.mark.parametrize("after", [0, 3, 15])
def test_while_a_stage_warms_up_the_stage_before_stands_in_widened(
    values: tuple[float, float], level: str, after: int
) -> None:
    """Loss and gradient norm 1000 times too high soon after a switch, and what sound switches were measured to do."""
    detector = SpikeDetector(128, 6.0)
    run(detector, curve(400))
    detector.rebaseline()
    assert set(run(detector, curve(400)[:after], 400)) <= {"ok"}
    report = detector.observe(400 + after, *values)
    assert report.level == level
    assert "the most that a switch of stage explains" in report.message or level == "ok"
    assert set(run(detector, curve(800)[400:], 401 + after)) == {"ok"}, "a spike does not dull the detector"
    assert detector.is_calm(801 + after)


def test_a_loss_that_stays_far_above_the_stage_before_is_the_new_level_after_one_error() -> None:
    detector = SpikeDetector(128, 6.0)
    run(detector, curve(200))
    detector.rebaseline()
    levels = run(detector, [(2000.0, 0.5)] * 100, 200)
    assert levels == ["warn"] * (RECOVERY_STEPS - 1) + ["error"] + ["ok"] * 50


def test_a_stage_that_ends_during_its_warm_up_hands_on_the_statistics_of_the_one_before() -> None:
    detector = SpikeDetector(128, 6.0)
    run(detector, curve(200))
    detector.rebaseline()
    run(detector, curve(200)[:5], 200)
    detector.rebaseline()
    assert detector.observe(205, 2000.0, 0.5).flagged


def test_nothing_stands_in_at_the_beginning_of_a_run_and_a_damaged_state_is_refused() -> None:
    detector = SpikeDetector(128, 6.0)
    assert detector.observe(0, 2000.0, 0.5).level == "ok"
    run(detector, curve(200), 1)
    detector.rebaseline()
    state = detector.state_dict()
    older = {key: value for key, value in state.items() if not key.endswith("_before")}
    with pytest.raises(CheckpointError, match="not from this version"):
        detector.load_state_dict(older)
    with pytest.raises(CheckpointError, match="statistics of the stage before"):
        detector.load_state_dict(state | {"loss_before": [0.5, "wide"]})


@pytest.mark.parametrize("split", [201, 205, 220, 260])
def test_reports_are_the_same_after_a_resume_in_a_later_stage(split: int) -> None:
    values = [(x + (210 <= i < 214) * 1000.0, g) for i, (x, g) in enumerate(curve(500))]

    def start() -> SpikeDetector:
        detector = SpikeDetector(64, 6.0)
        run(detector, values[:200])
        detector.rebaseline()
        return detector

    straight = start()
    run(straight, values[200:split], 200)
    resumed = SpikeDetector(64, 6.0)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    reports = [(straight.observe(i, *values[i]), resumed.observe(i, *values[i])) for i in range(split, 500)]
    assert all(one == other for one, other in reports)
    assert {i + split for i, (one, _) in enumerate(reports) if one.flagged} == {210, 211, 212, 213} - set(range(split))


@pytest.mark.parametrize("split", [10, 310])
def test_reports_are_the_same_after_a_resume(split: int) -> None:
    """Also in the middle of a spike, 10 steps into the wait for its recovery."""
    values = [(x + (i >= 300) * 1.0, g) for i, (x, g) in enumerate(curve(500))]
    straight = SpikeDetector(64, 6.0)
    run(straight, values[:split])
    resumed = SpikeDetector(64, 6.0)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for step in range(split, 500):
        assert straight.observe(step, *values[step]) == resumed.observe(step, *values[step])
