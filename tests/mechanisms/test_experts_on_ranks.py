"""Experts on ranks compute what one device does: loss, every gradient, norms, auxiliary losses, and the experts' load.

With and without expert parallelism, next to data, context, tensor and pipeline parallelism.
"""

from pathlib import Path

import pytest
import torch

from moba_train.data.batch import collate
from moba_train.parallel.activations import Kept
from moba_train.parallel.forward import accumulate_gradients
from tests.run import test_pipeline_gradients
from tests.run.test_pipeline_gradients import (
    SPARSE,
    Case,
    Found,
    Model,
    assert_equal,
    drawn_samples,
    found,
    on_one_device,
    worker,
)
from tests.run.trainer_ranks import Ranks

__all__ = ["found"]

ROUTER = {"aux_loss": 0.5, "z_loss": 0.01, "balance": "both"}
MIXTURE = {"experts": 8, "active": 3, "intermediate_size": 16, "shared": 1, "shared_gate": True, "router": ROUTER}
EXPERTS: Model = {"attention": SPARSE, "further": {"moe": MIXTURE}}
BIASED: Model = {"attention": SPARSE, "further": {"moe": MIXTURE | {"bias": True, "clamp": 1.0}}}
HALF: Model = {
    "attention": SPARSE,
    "tied": True,
    "further": {"moe": MIXTURE | {"layers": "every:2", "router": {"score": "sigmoid", "balance": "bias"}}},
    "kept": (Kept.INPUT, Kept.ATTENTION, Kept.PRODUCTS, Kept.ALL),
}
OVER_RANKS: Model = EXPERTS | {"further": {"moe": MIXTURE | {"router": ROUTER | {"aux_loss_over": "batch"}}}}
RECOMPUTED = EXPERTS | {"kept": (Kept.INPUT, Kept.ATTENTION, Kept.INPUT, Kept.PRODUCTS)}
ZERO_BUBBLE = {"pp": 2, "pp_schedule": "zero_bubble"}
TWO_RANKS: dict[str, Case] = {
    "dp 2": (EXPERTS, {}),
    "cp 2": (RECOMPUTED, {"cp": 2}),
    "tp 2": (RECOMPUTED, {"tp": 2}),
    "ep 2": (BIASED, {"ep": 2}),
    "ep 2 of cp 2": (HALF, {"ep": 2, "cp": 2}),
    "2 micro-batches at once, ep 2": (OVER_RANKS, {"ep": 2}),
}
FOUR_RANKS: dict[str, Case] = {
    "ep 2 of dp 4": (HALF, {"ep": 2}),
    "ep 4": (BIASED, {"ep": 4}),
    "ep 2, tp 2": (EXPERTS, {"ep": 2, "tp": 2}),
    "ep 2, replicas": (EXPERTS, {"ep": 2, "dp_replicate": 2}),
    **({"ep 2, zero bubble": (EXPERTS, {"ep": 2, **ZERO_BUBBLE})} if torch.__version__ >= "2.12" else {}),
    "pp 2, tp 2": (HALF, {"pp": 2, "tp": 2}),
    "2 micro-batches at once, cp 2, replicas": (OVER_RANKS, {"cp": 2, "dp_replicate": 2}),
    "2 micro-batches at once, pp 2": (OVER_RANKS, {"pp": 2}),
}


@pytest.mark.parametrize("name", [*TWO_RANKS, *FOUR_RANKS])
def test_it_computes_what_one_device_does(name: str, found: dict[str, Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """If the auxiliary loss takes the load of all ranks, with what they compute at the same time as one micro-batch."""
    model, _ = (TWO_RANKS | FOUR_RANKS)[name]
    assert "expert_load_max_layer_3" in found[name]
    assert ("auxiliary" in found[name]) == (model is not HALF)
    if model is OVER_RANKS:
        size = int(name[0])
        made = drawn_samples()
        batches = [collate(made[first : first + size]) for first in range(0, len(made), size)]
        monkeypatch.setattr(
            test_pipeline_gradients,
            "accumulate_gradients",
            lambda model, _, weight: accumulate_gradients(model, batches, weight),
        )
    assert_equal(found[name], on_one_device(model))


@pytest.mark.parametrize(("count", "tp"), [(8, 1), pytest.param(16, 2, marks=pytest.mark.slow)])
def test_ranks_as_pipeline_context_and_expert_parallelism(count: int, tp: int, ranks: Ranks, tmp_path: Path) -> None:
    """pp 2 (1F1B), cp 2, ep 4: each pipeline rank has a quarter of the experts of its layers; alone and with tp 2."""
    cases = [(RECOMPUTED, {"pp": 2, "cp": 2, "ep": 4, "tp": tp})]
    ranks.work(worker, (cases, str(tmp_path / "results.pt")), count)
    (got,) = torch.load(tmp_path / "results.pt", weights_only=True)
    assert_equal(got, on_one_device(RECOMPUTED))
