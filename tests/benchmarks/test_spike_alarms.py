"""The detector is quiet on clean curves and sees large spikes, by the program that measures both."""

import json
import math
from pathlib import Path

import pytest

from benchmarks.spike_alarms import detection_rate, flagged_steps, main, measure, synthetic_curve
from moba_train.config.health import SpikeConfig

DEFAULT = SpikeConfig().warn_sigma


@pytest.mark.parametrize("noise", ["gaussian", "drifting"])
def test_no_alarm_in_5000_clean_steps(noise: str) -> None:
    """Warm-up, a decaying loss, a gradient norm that rises, falls and creeps up, with noise as large runs have it."""
    assert not flagged_steps(synthetic_curve(noise, 5000, 7), DEFAULT)


def test_noise_with_heavy_tails_alarms_in_few_of_5000_clean_steps() -> None:
    """Tails in which 6 sigma come 3,000 times as often as in a Gaussian's."""
    assert len(flagged_steps(synthetic_curve("heavy", 5000, 7), DEFAULT)) <= 2


def test_a_larger_spike_is_seen_more_often() -> None:
    curves = [synthetic_curve("gaussian", 1500, 7)]
    rates = [detection_rate(curves, 1, sigmas, DEFAULT) for sigmas in (3, 10, 30)]
    assert rates == sorted(rates)
    assert rates[0] < 0.2
    assert rates[-1] > 0.9


def test_a_curve_that_is_too_short_for_a_spike_has_no_rate() -> None:
    found = measure([synthetic_curve("gaussian", 250, 7)])
    assert found["steps"] == 250
    assert all(math.isnan(rate) for rates in found["detected_by_sigma"].values() for rate in rates.values())


def test_the_program_reads_runs_and_starts_over_at_their_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [
        {"type": "metrics", "step": step, "stage": stage, "loss": level, "grad_norm": 1.0}
        for stage, level, steps in (("short", 2.0, range(140)), ("long", 4.0, range(140, 280)))
        for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    output = tmp_path / "out.json"
    main([str(tmp_path / "metrics.jsonl"), "--steps", "280", "--curves", "1", "--output", str(output)])
    recorded = json.loads(output.read_text())["results"]["recorded"]
    assert recorded["steps"] == 280
    assert recorded["alarms_per_10000_steps_by_threshold"]["6"] == 0
    assert "recorded: 280 steps" in capsys.readouterr().out
