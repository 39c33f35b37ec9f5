"""Gated DeltaNet against its recurrence in float64 (arXiv:2412.06464, equation 10)."""

import pytest
import torch

from moba_train.mechanisms.linear import kda
from moba_train.mechanisms.linear.fla import has_fla
from tests.attention.kind_checks import Layer, flat, make_layer, results
from tests.mechanisms.test_kda import assert_fla_is_near_float64, delta_oracle

LENGTHS = [12, 0, 1, 27]


def oracle(layer: Layer) -> list[torch.Tensor]:
    """The layer's output, with one decay for all channels of a head."""
    p, x = layer.parameters, layer.x
    alpha = torch.exp(-torch.exp(p.A_log) * torch.log1p(torch.exp(x @ p.decay.weight.T + p.dt_bias)))
    gate = x @ p.gate.weight.T
    return delta_oracle(layer, LENGTHS, alpha.unsqueeze(-1).expand_as(layer.q), gate / (1 + torch.exp(-gate)))


def test_output_and_every_gradient_are_those_of_the_oracle() -> None:
    layer = make_layer("gdn", {}, LENGTHS)
    got = results(layer)
    want = results(layer, oracle)
    assert len(got[2]) == 9
    assert all(x.any() for x in flat(want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


OWN = {"heads": {"keys": 2, "values": 4, "width": 6}}
"""Heads and projections of the kind, as in Qwen3-Next (tests/tools/convert compares them with transformers)."""


def test_the_layer_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("gdn", {}, LENGTHS)
    want = results(layer)
    monkeypatch.setattr(kda, "most_rows", lambda channels: 9)
    torch.testing.assert_close(results(layer), want, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not has_fla(), reason="the package fla-core is not installed")
def test_fla_in_bf16_is_near_plain_pytorch_in_float64() -> None:
    """Output and every gradient, by the kernels of `kda`, with decays as they are at the start of training."""
    assert_fla_is_near_float64("gdn")
