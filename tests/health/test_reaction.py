"""Which reaction a spike gets: skipped while that helps, rolled back when it does not, stopped when nothing does."""

from typing import Any

import pytest

from moba_train.config.health import SpikeConfig
from moba_train.health.reaction import BUDGET_STEPS, good_before, react
from moba_train.health.spike import RECOVERY_STEPS, SpikeDetector, SpikeReport

OK = SpikeReport("ok", 0.1, 0.1, "")
WARN = SpikeReport("warn", 7.0, 0.0, "high", flagged=True)
ERROR = SpikeReport("error", 4.0, 0.0, "does not come back")
FATAL = SpikeReport("fatal", float("nan"), float("nan"), "nan", flagged=True)


@pytest.mark.parametrize(
    ("reaction", "actions"),
    [
        ("log", ["apply", "apply", "apply", "stop"]),
        ("skip_step", ["apply", "skip", "apply", "skip"]),
        ("rollback", ["apply", "skip", "rollback", "rollback"]),
    ],
)
def test_each_level_gets_the_configured_reaction(reaction: str, actions: list[str]) -> None:
    config = SpikeConfig(reaction=reaction)
    assert [react(config, report, 100, [], []).action for report in (OK, WARN, ERROR, FATAL)] == actions


def test_when_skipping_does_not_help_the_run_goes_back_or_ends() -> None:
    spent = [97, 98, 99]
    stop = react(SpikeConfig(reaction="skip_step", max_skips=3), WARN, 100, spent, [])
    assert stop.action == "stop"
    assert "health.spike.max_skips" in stop.message
    assert react(SpikeConfig(reaction="rollback", max_skips=3), WARN, 100, spent, []).action == "rollback"
    later = 97 + BUDGET_STEPS
    assert react(SpikeConfig(reaction="skip_step", max_skips=3), WARN, later, spent, []).action == "skip"


def test_when_rollbacks_do_not_help_the_run_ends() -> None:
    config = SpikeConfig(reaction="rollback", max_rollbacks=2)
    assert react(config, FATAL, 100, [], [[50, 40]]).action == "rollback"
    stop = react(config, FATAL, 100, [], [[50, 40], [70, 60]])
    assert stop.action == "stop"
    assert "health.spike.max_rollbacks" in stop.message
    actions = [react(config, FATAL, old + BUDGET_STEPS, [], [[50, 40], [70, 60]]).action for old in (49, 50)]
    assert actions == ["stop", "rollback"], "they count from the step at which they were made"


def test_a_good_checkpoint_is_from_before_the_spike() -> None:
    metas: list[dict[str, Any]] = [{"good": step <= 30, "progress": {"step": step}} for step in range(10, 60, 10)]

    def newest(flagged: set[int], *rollbacks: list[int]) -> int | None:
        good = [meta["progress"]["step"] for meta in metas if good_before(60, flagged, rollbacks)(meta)]
        return max(good, default=None)

    assert newest({39, 41}) == 30
    assert newest({31, 32}) == 20
    assert newest({11, 21, 31}) is None
    assert newest(set(), [35, 20]) == 20, "what a rollback has undone is not gone back to later"
    assert newest(set(), [30, 10]) == 30, "saved right after the rollback"
    assert not good_before(30, set(), [])(metas[2]), "nor is that of the step itself"


@pytest.mark.parametrize("progress", [None, {}, [], {"step": None}, {"step": "20"}, {"step": [20]}, {"step": True}, 20])
def test_a_checkpoint_from_elsewhere_without_a_step_is_never_gone_back_to(progress: object) -> None:
    accept = good_before(60, set(), [])
    assert not accept({"good": True, "progress": progress})
    assert not accept({})


def test_calm_comes_back_50_steps_after_the_last_flagged_one() -> None:
    detector = SpikeDetector(128, 6.0)
    for step in range(100):
        detector.observe(step, 2.0, 0.5)
    assert detector.is_calm(99)
    assert detector.observe(100, 2.0, 50.0).flagged
    for step in range(101, 101 + RECOVERY_STEPS):
        assert not detector.is_calm(step - 1)
        detector.observe(step, 2.0, 0.5)
    assert detector.is_calm(100 + RECOVERY_STEPS)


def test_a_loss_that_nobody_saw_recover_is_not_calm() -> None:
    """Steps without a loss token are not observed."""
    detector = SpikeDetector(128, 6.0)
    for step in range(100):
        detector.observe(step, 2.0, 0.5)
    assert detector.observe(100, 9.0, 0.5).flagged
    assert not detector.is_calm(100 + RECOVERY_STEPS)
    detector.observe(101 + RECOVERY_STEPS, 2.0, 0.5)
    assert detector.is_calm(101 + RECOVERY_STEPS)
