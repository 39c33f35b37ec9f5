"""Training with the transport `dispatch` is that of one device."""

import shutil

import pytest

from tests.run.test_context_training import STEPS, assert_same_training, curves, lengthened
from tests.run.tiny_run import Run
from tests.run.trainer_ranks import Ranks


def test_dispatch_trains_where_every_layer_selects_blocks(run: Run, ranks: Ranks) -> None:
    """Evaluated with full attention, too, which cannot be dispatched."""
    run.recipe["stages"][1]["attention"] = {"full_layers": "none"}
    lengthened(run, STEPS)
    run.recipe["evaluation"]["position_wise"] = {"bucket": 32, "sequences": 2}
    ranks.train(run, 1)
    alone, trailing = curves(run), run.records("position_wise")[-1]["trailing_loss_full"]
    shutil.rmtree(run.run_dir)
    run.recipe["stages"][1]["parallel"] = {"cp": 2, "cp_transport": "dispatch"}
    ranks.train(run, 2)
    (choice,) = run.records("parallel")
    assert "dispatch over 2 ranks, zigzag" in choice["message"]
    assert_same_training(curves(run), alone)
    assert run.records("position_wise")[-1]["trailing_loss_full"] == pytest.approx(trailing, rel=1e-3)
