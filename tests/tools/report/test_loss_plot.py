"""The loss plot of a run can be drawn from its history."""

import math
import random
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from moba_train.errors import UserError
from moba_train.telemetry.jsonl import JsonlSink
from moba_train.telemetry.telemetry import Telemetry
from moba_train.tools.report.plots import plot_run


def write_history(run_dir: Path) -> None:
    """900 steps in three stages, with a spike at step 420, a NaN and evaluations."""
    noise = random.Random(0)
    telemetry = Telemetry([JsonlSink(run_dir / "metrics.jsonl", None)])
    for step in range(900):
        tokens = step * 65536
        for stage, first in (("short", 0), ("activate", 500), ("long", 700)):
            if step == first:
                telemetry.stage = stage
                telemetry.event(step, tokens, "stage", stage)
        loss = 2.0 + 9.0 * (step + 10) ** -0.35 + noise.gauss(0, 0.05)
        if step == 420:
            loss += 1.5
            telemetry.event(step, tokens, "spike", "loss is 12 sigma above its median")
        lr = 1e-3 * min(1, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / 900))
        telemetry.log(step, tokens, {"loss": math.nan if step == 600 else loss, "lr": lr})
        if step % 100 == 99:
            telemetry.event(step, tokens, "validation_loss", "", eval_loss=2.02 + 9.0 * (step + 10) ** -0.35)
            telemetry.event(step, tokens, "position_wise", "", trailing_loss=1.9 + 9.0 * (step + 10) ** -0.35)
    telemetry.close()


def test_the_plot_shows_the_run(tmp_path: Path) -> None:
    write_history(tmp_path)
    path = plot_run(tmp_path)
    assert path == tmp_path / "loss.png"
    pixels = np.round(255 * matplotlib.image.imread(path)[..., :3]).astype(int)
    assert pixels.shape == (900, 1500, 3)
    colours = {"smoothed": (8, 81, 156), "evaluation": (230, 85, 13), "trailing": (49, 163, 84), "spike": (214, 39, 40)}
    for name, colour in colours.items():
        assert (pixels == colour).all(-1).any(), name


def test_a_run_without_losses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no training loss"):
        plot_run(tmp_path)
