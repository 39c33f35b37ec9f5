"""Gated DeltaNet against its recurrence in float64 (arXiv:2412.06464, equation 10)."""

import pytest
import torch

from moba_train.mechanisms.linear import kda
from moba_train.mechanisms.linear.fla import has_fla
from tests.attention.kind_checks import MODEL, Layer, flat, make_layer, results
from tests.mechanisms.test_kda import assert_fla_is_near_float64, convolved, unit

LENGTHS = [12, 0, 1, 27]


def oracle(layer: Layer) -> list[torch.Tensor]:
    """The layer's output, document by document, head by head, token by token."""
    p = layer.parameters
    heads = MODEL.heads
    width = MODEL.head_width
    group = heads // MODEL.kv_heads
    rows = []
    first = 0
    for length in filter(None, LENGTHS):
        part = slice(first, first + length)
        first += length
        x = layer.x[part]
        q = unit(convolved(layer.q[part], p.q_conv.weight)) / width**0.5
        k = unit(convolved(layer.k[part], p.k_conv.weight))
        v = convolved(layer.v[part], p.v_conv.weight)
        alpha = torch.exp(-torch.exp(p.A_log) * torch.log1p(torch.exp(x @ p.decay.weight.T + p.dt_bias)))
        beta = 1 / (1 + torch.exp(-x @ p.beta.weight.T))
        gate = x @ p.gate.weight.T
        gate = (gate / (1 + torch.exp(-gate))).view(length, heads, width)
        states = [torch.zeros(width, width, dtype=x.dtype)] * heads
        for token in range(length):
            outputs = []
            for head in range(heads):
                key = k[token, head // group]
                value = v[token, head // group]
                kept = alpha[token, head] * (torch.eye(width) - beta[token, head] * torch.outer(key, key))
                states[head] = kept @ states[head] + beta[token, head] * torch.outer(key, value)
                out = states[head].T @ q[token, head]
                outputs.append(out / (out.square().mean() + MODEL.norm_eps).sqrt() * p.norm.weight)
            rows.append(torch.stack(outputs) * gate[token])
    return [torch.stack(rows)]


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
