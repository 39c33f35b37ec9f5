"""The losses that are compared are the same function, and one that is wrong would be seen."""

import pytest
import torch
from torch import Tensor

from benchmarks.loss_compare import chunked, errors, implementations, inputs_of, measure, plain

CPU = torch.device("cpu")


def test_every_loss_that_runs_here_has_the_gradients_of_plain_logits() -> None:
    found = {name: loss for name, loss in implementations().items() if not isinstance(loss, str)}
    assert {"ours", "plain logits"} <= found.keys()
    inputs = inputs_of(64, 32, 512, CPU)
    for name, loss in found.items():
        if name != "ours, compiled chunk" and "liger" not in name:  # they need a compiler, and a GPU
            assert max(errors(loss, inputs)) < 0.02, name

    def doubled(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
        return 2 * plain(hidden_TD, weight_VD, labels_T)

    assert errors(doubled, inputs) == pytest.approx([1, 1, 1], rel=0.02)


def test_peak_memory_counts_the_gradients() -> None:
    inputs = inputs_of(64, 32, 512, CPU)
    assert measure(chunked, inputs, 1)["peak_gib"] * 2**30 > 2 * (64 + 512) * 32
