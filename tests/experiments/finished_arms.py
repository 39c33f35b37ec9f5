"""What an arm of a figure would have given whose losses are known."""

from typing import Any

from experiments.figure import Result


def finished_arm(name: str, seed: int, loss: float, **more: Any) -> Result:
    """An arm whose validation loss and trailing loss are both `loss`; `more`: other keys, those of its last stage in
    `stage`."""
    position = {"attention": "own", "curves": {"own": {"mean": [loss]}}}
    last = {
        "validation_loss": {"eval_loss": loss},
        "position_wise": {"trailing_loss": loss, "position_wise": position},
        **more.pop("stage", {}),
    }
    return {"name": name, "seed": seed, "stages": {"train": last}, **more}
