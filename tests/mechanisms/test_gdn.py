"""Gated DeltaNet against its recurrence in float64 (arXiv:2412.06464, equation 10), and both layers of Qwen3-Next
against transformers."""

from typing import Any

import pytest
import torch

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.layout import packed_layout
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.linear import kda
from moba_train.mechanisms.linear.fla import has_fla
from moba_train.mechanisms.linear.gdn import GdnKind
from moba_train.model.block import Attention
from moba_train.model.rope import rope_cos_sin
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    make_layer,
    results,
)
from tests.mechanisms.test_kda import convolved, flat, unit
from tests.tools.decoding_checks import assert_decodes_like_training

LENGTHS = [12, 0, 1, 27]


def oracle(layer: Layer) -> list[torch.Tensor]:
    """The layer's output, document by document, head by head, token by token."""
    p, heads, width = layer.parameters, MODEL.heads, MODEL.head_width
    group = heads // MODEL.kv_heads
    rows, first = [], 0
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
                key, value = k[token, head // group], v[token, head // group]
                kept = alpha[token, head] * (torch.eye(width) - beta[token, head] * torch.outer(key, key))
                states[head] = kept @ states[head] + beta[token, head] * torch.outer(key, value)
                out = states[head].T @ q[token, head]
                outputs.append(out / (out.square().mean() + MODEL.norm_eps).sqrt() * p.norm.weight)
            rows.append(torch.stack(outputs) * gate[token])
    return [torch.stack(rows)]


def test_output_and_every_gradient_are_those_of_the_oracle() -> None:
    layer = make_layer("gdn", {}, LENGTHS)
    got, want = results(layer), results(layer, oracle)
    assert len(got[2]) == 9
    for ours, theirs in zip(flat(got), flat(want), strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_packed_documents_and_decoding() -> None:
    assert_documents_are_independent("gdn", {}, LENGTHS)
    assert_decodes_like_training("gdn", {})


@pytest.mark.parametrize("strategy", [STRATEGIES[0], STRATEGIES[3]], ids=str)
def test_ranks_that_share_a_sequence(strategy: CPStrategy) -> None:
    assert_ranks_equal_one_device(make_layer("gdn", {}, [21, 0, 1, 42]), strategy, atol=1e-10)


def test_the_layer_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer("gdn", {}, LENGTHS)
    want = flat(results(layer))
    monkeypatch.setattr(kda, "most_rows", lambda channels: 9)
    for got, expected in zip(flat(results(layer)), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def qwen3_next(**changes: Any) -> Any:
    from transformers import Qwen3NextConfig

    sizes: dict[str, Any] = {
        "hidden_size": MODEL.hidden_size,
        "num_attention_heads": MODEL.heads,
        "num_key_value_heads": MODEL.kv_heads,
        "head_dim": MODEL.head_width,
        "num_hidden_layers": 4,
        "rms_norm_eps": MODEL.norm_eps,
        "attn_implementation": "eager",
    }
    return Qwen3NextConfig(**sizes, **changes)


def randomized(module: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def test_a_linear_layer_of_qwen3_next() -> None:
    """As many key heads as value heads: ours have one width, and share keys and values alike."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    model = MODEL.model_copy(update={"kv_heads": MODEL.heads})
    heads, width = model.heads, model.head_width
    config = qwen3_next(
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
    )
    theirs = randomized(Qwen3NextGatedDeltaNet(config, 0))
    ours = Attention(model, 0, {"gdn": GdnKind.parameters(GdnKind.Options(), model, 0)})
    kind = GdnKind(GdnKind.Options(), width)
    ours.kind = kind
    own: Any = ours.gdn
    mixed = theirs.in_proj_qkvz.weight.unflatten(0, (heads, 4, width))
    step, decay = theirs.in_proj_ba.weight.unflatten(0, (heads, 2)).unbind(1)
    convolutions = theirs.conv1d.weight.squeeze(1).chunk(3)
    pairs = [
        *zip(
            (ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight, own.gate.weight), mixed.unbind(1), strict=True
        ),
        *zip((conv.weight for conv in own.convolutions), convolutions, strict=True),
        *((own.beta.weight, step), (own.decay.weight, decay), (own.norm.weight, theirs.norm.weight)),
        *((own.A_log, theirs.A_log), (own.dt_bias, theirs.dt_bias), (ours.o_proj.weight, theirs.out_proj.weight)),
    ]
    x = torch.randn(37, model.hidden_size)
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source.reshape(target.shape))
        nothing = torch.ones(37, 1, width // 2)
        got, _ = ours(x, nothing, nothing, packed_layout([37]))
        want = theirs(x[None])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_a_full_layer_of_qwen3_next() -> None:
    """A gate for each channel, a quarter of each head turns, centred norms of heads."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = qwen3_next(rope_parameters=rope)
    theirs = randomized(Qwen3NextAttention(config, 3))
    changes = {"qk_norm": True, "centered_norms": True, "gate_layers": "every:2", "rope": {"fraction": 0.25}}
    model = ModelConfig.model_validate(MODEL.model_dump() | changes)
    ours = Attention(model, 1, {})
    ours.kind = FullKind(FullKind.Options(backend="reference"), model.head_width)
    q, gate = theirs.q_proj.weight.unflatten(0, (model.heads, 2, -1)).unbind(1)
    names = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    x, positions = torch.randn(37, model.hidden_size), torch.arange(37)
    with torch.no_grad():
        ours.q_proj.weight.copy_(q.flatten(0, 1))
        ours.output_gate.weight.copy_(gate.flatten(0, 1))
        for name in names:
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
        cos, sin = rope_cos_sin(positions, model.rope, model.head_width)
        got, _ = ours(x, cos, sin, packed_layout([37]))
        mask = torch.full((37, 37), -torch.inf).triu(1)[None, None]
        want = theirs(x[None], Qwen3NextRotaryEmbedding(config)(x[None], positions[None]), mask)[0][0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


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
