"""Gated DeltaNet against its recurrence in float64 (arXiv:2412.06464, equation 10)."""

import pytest
import torch

from moba_train.attention.layout import packed_layout
from moba_train.mechanisms.linear import kda
from moba_train.mechanisms.linear.fla import has_fla
from moba_train.mechanisms.linear.gdn import GdnKind
from tests.attention.kind_checks import (
    MODEL,
    Layer,
    make_layer,
    results,
)
from tests.mechanisms.test_kda import convolved, flat, unit

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
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


OWN = {"heads": {"keys": 2, "values": 4, "width": 6}}
"""Heads and projections of the kind, as in Qwen3-Next (tests/tools/convert compares them with transformers)."""


def test_the_layer_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("gdn", {}, LENGTHS)
    want = flat(results(layer))
    monkeypatch.setattr(kda, "most_rows", lambda channels: 9)
    for got, expected in zip(flat(results(layer)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not has_fla(), reason="the package fla-core is not installed")
def test_fla_in_bf16_is_near_plain_pytorch_in_float64() -> None:
    """Output and every gradient, by the kernels of `kda`, with decays as they are at the start of training."""
    lengths = [300, 1, 129, 82]
    model = MODEL.model_copy(update={"head_dim": 64, "hidden_size": 64})
    found = []
    for backend, device, dtype in (("fla", "cuda", torch.bfloat16), ("torch", "cpu", torch.float64)):
        layer = make_layer("gdn", {"backend": backend}, lengths, model=model)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in layer.named_parameters().items():
            initial = GdnKind.initial_values(name, parameter.shape, generator)
            parameter.data = parameter.data / 8 if initial is None else initial
        for tensor in (*layer.inputs(), *layer.named_parameters().values()):
            tensor.data = tensor.data.bfloat16().to(device, dtype)
        layer.layout = packed_layout(lengths, device)
        found.append(flat(results(layer)))
    for index, (fla, exact) in enumerate(zip(*found, strict=True)):
        assert (fla.cpu().double() - exact).norm() < 2e-2 * exact.norm(), index
