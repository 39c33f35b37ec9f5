"""The Transformer computes what a plain Llama computes, document by document."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.config.model import ModelConfig, RopeConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer

BASE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "init_std": 0.3,  # large, so that every part of the model moves the logits
}
SHAPES = [
    pytest.param({}, id="llama"),
    pytest.param({"kv_heads": 4, "head_dim": None}, id="multi-head"),
    pytest.param({"tie_embeddings": True}, id="tied"),
    pytest.param({"qkv_bias": True, "o_bias": True}, id="qwen2-and-gpt-oss"),
    pytest.param({"qk_norm": True, "tie_embeddings": True}, id="qwen3"),
    pytest.param({"rope": RopeConfig(kind="pi", factor=2), "norm_eps": 0.1}, id="pi-and-eps"),
    pytest.param({"norms": "post", "qk_norm": "all_heads"}, id="olmo"),
    pytest.param(
        {"norms": "both", "centered_norms": True, "qk_norm": True, "activation": "gelu_tanh", "embedding_scale": 4.0},
        id="gemma",
    ),
    pytest.param(
        {"attention_scale": 0.1, "residual_scale": 0.7, "logits_divisor": 0.3, "embedding_scale": 3.0}, id="granite"
    ),
    pytest.param({"rope": RopeConfig(fraction=0.5, overrides={"every:2": {"kind": "nope"}})}, id="smollm3-and-partial"),
    pytest.param({"rope": RopeConfig(overrides={0: {"theta": 50.0, "fraction": 0.75}})}, id="two-bases"),
    pytest.param({"logits_cap": 0.5}, id="gemma-2"),
    pytest.param({"gate_layers": "all"}, id="gates-of-channels"),
    pytest.param({"activation": "clamped", "init_std": 1.5}, id="clamped"),
    pytest.param({"gate_layers": "last:1", "output_gate": "head", "sink_layers": "first:1"}, id="gates-of-heads"),
    pytest.param({"sink_layers": "all", "kv_heads": 1}, id="sinks"),
]


def build(device: torch.device | str, kinds: Any = None, **changes: Any) -> Transformer:
    config = ModelConfig(**{**BASE, **changes})
    model = Transformer(config).to(device)
    initialize_weights(model, seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # norms and biases away from 1 and 0, or a test could not tell them from nothing
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(device))
    model.set_attention(kinds or [FullKind(FullKind.Options(), config.head_width)] * config.layers)
    return model


def inputs(lengths: list[int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, Layout]:
    """tokens, positions and layout of packed documents; positions start anew in each."""
    tokens = torch.randint(50, (sum(lengths),), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    return tokens, positions, packed_layout(lengths, device)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """One document through Llama, from the weights alone, with torch's own attention."""
    config, weights = model.config, dict(model.named_parameters())
    width = config.head_width
    eps = config.norm_eps
    scale = width**-0.5 if config.attention_scale is None else config.attention_scale
    steps = torch.arange(len(tokens), device=tokens.device, dtype=torch.float32) / config.rope.factor

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = weights.get(f"{name}_norm.weight" if name else "norm.weight")
        return x if weight is None else rms(x, weight + config.centered_norms, eps)

    def rope(x_HTd: torch.Tensor, layer: int) -> torch.Tensor:
        own = config.rope.by_layer(config.layers)[layer]
        half = int(width * own.fraction) // 2
        angles = torch.outer(steps, own.theta ** (-torch.arange(half, device=tokens.device) / half))
        if own.kind == "nope":
            return x_HTd
        a, b, rest = x_HTd.split([half, half, width - 2 * half], -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), rest], -1)

    def heads(x: torch.Tensor, layer: str, name: str) -> torch.Tensor:
        y = F.linear(x, weights[f"{layer}.{name}_proj.weight"], weights.get(f"{layer}.{name}_proj.bias"))
        if config.qk_norm == "all_heads":
            y = norm(y, f"{layer}.{name}")
        y = y.view(len(tokens), -1, width).transpose(0, 1)
        return y if config.qk_norm == "all_heads" else norm(y, f"{layer}.{name}")

    x = config.embedding_scale * weights["embedding.weight"][tokens]
    for i in range(config.layers):
        attention, feed_forward = f"blocks.{i}.attention", f"blocks.{i}.feed_forward"
        y = norm(x, attention)
        gates = weights.get(f"{attention}.output_gate.weight")
        gate = None if gates is None else (y @ gates.T).sigmoid()
        q = rope(heads(y, attention, "q"), i)
        k = rope(heads(y, attention, "k"), i)
        v = heads(y, attention, "v")
        k, v = (side.repeat_interleave(config.heads // config.kv_heads, 0) for side in (k, v))
        scores = (scale * q @ k.mT).masked_fill(~torch.ones_like(q @ k.mT).tril().bool(), -torch.inf)
        sink = weights.get(f"{attention}.sink.weight")
        if sink is not None:
            scores = torch.cat([scores, sink[:, None, None].expand(-1, len(tokens), 1)], -1)
        y = (scores.softmax(-1)[..., : len(tokens)] @ v).transpose(0, 1)
        if gate is not None:
            y = y * gate.view(len(tokens), config.heads, -1)
        y = y.flatten(1) @ weights[f"{attention}.o_proj.weight"].T + weights.get(f"{attention}.o_proj.bias", 0)
        x = x + config.residual_scale * norm(y, f"{attention}_post")
        y = norm(x, feed_forward)
        gate, up = (y @ weights[f"{feed_forward}.{name}_proj.weight"].T for name in ("gate", "up"))
        if config.activation == "clamped":
            gate, up = torch.minimum(gate, torch.tensor(7.0)), up.clip(-7, 7) + 1
            gate = gate / (1 + torch.exp(-1.702 * gate))
        else:
            gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
        x = x + config.residual_scale * norm(
            (gate * up) @ weights[f"{feed_forward}.down_proj.weight"].T, f"{feed_forward}_post"
        )
    head = weights["embedding.weight" if config.tie_embeddings else "output.weight"]
    logits = norm(x, "") @ head.T / config.logits_divisor
    return logits if config.logits_cap is None else config.logits_cap * (logits / config.logits_cap).tanh()


@pytest.mark.parametrize("changes", SHAPES)
def test_float32_logits_and_gradients_equal_a_plain_implementation(
    changes: dict[str, Any], device: torch.device
) -> None:
    model = build(device, **changes)
    tokens, positions, layout = inputs([17], device)
    got, want = model(tokens, positions, layout), plain_logits(model, tokens)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)).to(device)
    parameters = list(model.parameters())
    for (name, _), a, b in zip(
        model.named_parameters(),
        torch.autograd.grad(got, parameters, upstream),
        torch.autograd.grad(want, parameters, upstream),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-4, name


@pytest.mark.parametrize("kind", ["full", "moba"])
def test_packed_documents_give_the_logits_of_each_document_alone(kind: str, device: torch.device) -> None:
    attention = {
        "full": FullKind(FullKind.Options(), 8),
        "moba": MobaKind(MobaKind.Options(block_size=4, topk=2), 8),
    }[kind]
    model = build(device, [attention] * 2)
    lengths = [13, 0, 1, 9]
    tokens, positions, layout = inputs(lengths, device)
    packed = model(tokens, positions, layout)
    start = 0
    for length in filter(None, lengths):
        rows = slice(start, start + length)
        alone = model(tokens[rows], positions[rows], packed_layout([length], device))
        torch.testing.assert_close(packed[rows], alone, rtol=1e-4, atol=1e-4)
        start += length


def test_a_moba_model_that_selects_every_block_is_the_full_attention_model(device: torch.device) -> None:
    """Staged training relies on it: weights do not depend on the attention kind of a layer."""
    model = build(device)
    batch = inputs([20, 7], device)
    full = model(*batch)
    every_block = MobaKind(MobaKind.Options(block_size=4, topk=5), 8)
    one_block = MobaKind(MobaKind.Options(block_size=4, topk=1), 8)
    for layer in range(2):
        kinds: list[AttentionKind] = [FullKind(FullKind.Options(), 8)] * 2
        kinds[layer] = every_block
        model.set_attention(kinds)
        torch.testing.assert_close(model(*batch), full, rtol=1e-4, atol=1e-4)
        kinds[layer] = one_block
        model.set_attention(kinds)
        assert (model(*batch) - full).abs().max() > 1e-2


def test_positions_are_the_ones_given(device: torch.device) -> None:
    """Shifting a document changes nothing (RoPE is relative); stretching its positions does."""
    model = build(device)
    tokens, positions, layout = inputs([12], device)
    logits = model(tokens, positions, layout)
    torch.testing.assert_close(model(tokens, positions + 5000, layout), logits, rtol=1e-3, atol=1e-3)
    assert (model(tokens, 7 * positions, layout) - logits).abs().max() > 1e-2


def test_the_rotary_embedding_may_change_between_steps(device: torch.device) -> None:
    """`pi` with factor 2 on doubled positions is the unchanged model."""
    model = build(device)
    tokens, positions, layout = inputs([12], device)
    logits = model(tokens, positions, layout)
    model.set_rope(RopeConfig(kind="pi", factor=2))
    torch.testing.assert_close(model(tokens, 2 * positions, layout), logits, rtol=1e-4, atol=1e-4)
    assert (model(tokens, positions, layout) - logits).abs().max() > 1e-2


def test_logits_of_given_rows_only(device: torch.device) -> None:
    model = build(device)
    batch = inputs([5, 6], device)
    rows = torch.tensor([4, 10], device=device)
    torch.testing.assert_close(model(*batch, rows_n=rows), model(*batch)[rows], rtol=1e-5, atol=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_given_rows(device: torch.device) -> None:
    model = build(device)
    batch = inputs([9, 6], device)
    index = torch.tensor([0, 3, 8, 14], device=device)
    labels = torch.tensor([7, 0, 49, 7], device=device)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0], device=device)
    loss = model.loss(*batch, (labels, index, weights)).loss
    want = (F.cross_entropy(model(*batch)[index], labels, reduction="none") * weights).sum()
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1])
def test_without_loss_tokens_every_parameter_still_gets_a_gradient_of_zero(rows: int, device: torch.device) -> None:
    """A data-parallel rank whose samples are all prompt must not hang or poison the others' reduction."""
    model = build(device, qkv_bias=True, qk_norm=True)
    nothing = torch.zeros(rows, dtype=torch.int64, device=device)
    loss = model.loss(*inputs([8], device), (nothing, nothing, torch.zeros(rows, device=device))).loss
    assert loss.item() == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_a_model_without_attention_kinds_says_what_to_do(device: torch.device) -> None:
    model = Transformer(ModelConfig(**BASE)).to(device)
    with pytest.raises(RuntimeError, match="set_attention"):
        model(*inputs([4], device))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        model.set_attention([FullKind(FullKind.Options(), 8)])


@pytest.mark.parametrize(
    ("published", "shape"),
    [
        pytest.param(1_235_814_400, (128256, 2048, 8192, 16, 32, 8, 64, True, False, False), id="Llama-3.2-1B"),
        pytest.param(8_030_261_248, (128256, 4096, 14336, 32, 32, 8, None, False, False, False), id="Llama-3.1-8B"),
        pytest.param(494_032_768, (151936, 896, 4864, 24, 14, 2, None, True, False, True), id="Qwen2.5-0.5B"),
        pytest.param(596_049_920, (151936, 1024, 3072, 28, 16, 8, 128, True, True, False), id="Qwen3-0.6B"),
    ],
)
def test_published_models_have_the_published_number_of_parameters(
    published: int, shape: tuple[int | None, ...]
) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
    names = (*sizes, "tie_embeddings", "qk_norm", "qkv_bias")
    with torch.device("meta"):
        model = Transformer(ModelConfig.model_validate(dict(zip(names, shape, strict=True))))
    assert sum(parameter.numel() for parameter in model.parameters()) == published
