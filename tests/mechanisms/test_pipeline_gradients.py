"""A pipeline whose layers have auxiliary losses, or in which gates alone learn, computes what one device does."""

from pathlib import Path

import pytest

from tests.run.test_pipeline_gradients import (
    Case,
    Found,
    Model,
    assert_compiling_changes_no_bit,
    assert_equal,
    found,
    on_one_device,
)
from tests.run.trainer_ranks import Ranks

__all__ = ["found"]

DISTILLED = {"default": "msa", "full_layers": [1, 3], "msa": {"block_size": 8, "topk": 2}}
WARM_UP = {"default": "msa", "full_layers": [2], "msa": {"block_size": 8, "topk": 2, "mode": "warmup"}}
AUXILIARY: Model = {"attention": DISTILLED, "tied": True}
FROZEN_BASE: Model = {"attention": WARM_UP, "trainable": ["*.attention.msa.*"]}
FROZEN_HALF: Model = {"attention": WARM_UP | {"full_layers": "first:2"}, "trainable": ["*.attention.msa.*"]}
TWO_RANKS: dict[str, Case] = {
    "interleaved": (AUXILIARY, {"pp": 2, "pp_schedule": "interleaved_1f1b"}),
    "zero bubble": (AUXILIARY, {"pp": 2, "pp_schedule": "zero_bubble"}),
    "frozen base": (FROZEN_BASE, {"pp": 2}),
    "frozen rank": (FROZEN_HALF, {"pp": 2}),
}
FOUR_RANKS: dict[str, Case] = {
    "pp 2 and dp 2, zero bubble, gradients exchanged": (
        AUXILIARY,
        {"pp": 2, "pp_schedule": "zero_bubble"},
    ),
}


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_it_computes_what_one_device_does(name: str, found: dict[str, Found]) -> None:
    model, _ = (TWO_RANKS | FOUR_RANKS)[name]
    assert "auxiliary" in found[name]
    assert_equal(found[name], on_one_device(model))


def test_all_ranks_run_their_parts_before_the_first_step_which_changes_no_bit(ranks: Ranks, tmp_path: Path) -> None:
    assert_compiling_changes_no_bit(AUXILIARY, ranks, tmp_path)
