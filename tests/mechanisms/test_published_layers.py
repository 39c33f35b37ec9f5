"""Attention layers of models whose experts are not ours: each alone computes what it does in transformers."""

from typing import Any

import pytest
import torch

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.kind import AttentionKind
from moba_train.attention.layout import packed_layout
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates.msa import MsaKind
from moba_train.mechanisms.linear.gdn import GdnKind
from moba_train.mechanisms.window import WindowKind
from moba_train.model.block import Attention
from moba_train.model.rope import rope_cos_sin
from tests.attention.kind_checks import MODEL

SIZES: dict[str, Any] = {
    "hidden_size": MODEL.hidden_size,
    "num_attention_heads": MODEL.heads,
    "num_key_value_heads": MODEL.kv_heads,
    "head_dim": MODEL.head_width,
    "num_hidden_layers": 4,
    "rms_norm_eps": MODEL.norm_eps,
    "attn_implementation": "eager",
}
TOKENS = 37


def randomized(module: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def test_a_linear_layer_of_qwen3_next() -> None:
    """As many key heads as value heads: ours have one width, and share keys and values alike."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    model = MODEL.model_copy(update={"kv_heads": MODEL.heads})
    heads = model.heads
    width = model.head_width
    config = Qwen3NextConfig(
        **SIZES,
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
    x = torch.randn(TOKENS, model.hidden_size)
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source.reshape(target.shape))
        nothing = torch.ones(TOKENS, 1, width // 2)
        got, _ = ours(x, nothing, nothing, packed_layout([TOKENS]))
        want = theirs(x[None])[0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_a_full_layer_of_qwen3_next() -> None:
    """A gate for each channel, a quarter of each head turns, centred norms of heads."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = Qwen3NextConfig(**SIZES, rope_parameters=rope)
    theirs = randomized(Qwen3NextAttention(config, 3))
    changes = {"qk_norm": True, "centered_norms": True, "gate_layers": "every:2", "rope": {"fraction": 0.25}}
    model = ModelConfig.model_validate(MODEL.model_dump() | changes)
    ours = Attention(model, 1, {})
    ours.kind = FullKind(FullKind.Options(backend="reference"), model.head_width)
    q, gate = theirs.q_proj.weight.unflatten(0, (model.heads, 2, -1)).unbind(1)
    names = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    x = torch.randn(TOKENS, model.hidden_size)
    positions = torch.arange(TOKENS)
    with torch.no_grad():
        ours.q_proj.weight.copy_(q.flatten(0, 1))
        ours.output_gate.weight.copy_(gate.flatten(0, 1))
        for name in names:
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
        cos, sin = rope_cos_sin(positions, model.rope, model.head_width)
        got, _ = ours(x, cos, sin, packed_layout([TOKENS]))
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
        want = theirs(x[None], Qwen3NextRotaryEmbedding(config)(x[None], positions[None]), mask)[0][0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("window", [None, 9])
def test_a_layer_of_gpt_oss(window: int | None) -> None:
    """Learned sinks, in a full layer and in one with a window; without the bias of its output projection."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    kinds = ["full_attention" if window is None else "sliding_attention"] * 4
    theirs = randomized(GptOssAttention(GptOssConfig(**SIZES, sliding_window=window, layer_types=kinds), 0))
    model = ModelConfig.model_validate(MODEL.model_dump() | {"qkv_bias": True, "sink_layers": "all"})
    ours = Attention(model, 0, {})
    kind: AttentionKind = FullKind(FullKind.Options(backend="reference"), model.head_width)
    ours.kind = kind if window is None else WindowKind(WindowKind.Options(window=window), model.head_width)
    x = torch.randn(TOKENS, model.hidden_size)
    cos, sin = rope_cos_sin(torch.arange(TOKENS), model.rope, model.head_width)
    far = torch.ones(TOKENS, TOKENS).triu(1) + torch.ones(TOKENS, TOKENS).tril(-(window or TOKENS))
    with torch.no_grad():
        theirs.o_proj.bias.zero_()
        ours.sink.weight.copy_(theirs.sinks)
        for name, parameter in ours.named_parameters():
            if name != "sink.weight":
                parameter.copy_(theirs.get_parameter(name))
        got, _ = ours(x, cos, sin, packed_layout([TOKENS]))
        mask = torch.zeros(TOKENS, TOKENS).masked_fill(far.bool(), -torch.inf)[None, None]
        want = theirs(x[None], (cos.squeeze(1)[None], sin.squeeze(1)[None]), mask)[0][0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_a_sparse_layer_of_minimax_m3() -> None:
    """An index branch with centred norms, half of each head turns, the heads of a group share their blocks."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
        MiniMaxM3VLAttention,
        MiniMaxM3VLRotaryEmbedding,
    )

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    width = MODEL.head_width
    index: dict[str, Any] = {
        "index_n_heads": MODEL.kv_heads,
        "index_head_dim": width,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    }
    kinds = ["minimax_m3_sparse"] * 4
    config = MiniMaxM3VLTextConfig(**SIZES, **index, index_local_blocks=1, layer_types=kinds, rope_parameters=rope)
    theirs = randomized(MiniMaxM3VLAttention(config, 0))
    changes = {"qk_norm": True, "centered_norms": True, "rope": {"fraction": 0.5}}
    model = ModelConfig.model_validate(MODEL.model_dump() | changes)
    options = MsaKind.Options(block_size=4, topk=3, backend="reference", train_gate=False)
    ours = Attention(model, 0, {"msa": MsaKind.parameters(options, model, 0)})
    ours.kind = MsaKind(options, width)
    x = torch.randn(TOKENS, model.hidden_size)
    positions = torch.arange(TOKENS)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(theirs.get_parameter(name.replace("msa.", "indexer.")))
        cos, sin = rope_cos_sin(positions, model.rope, width)
        got, _ = ours(x, cos, sin, packed_layout([TOKENS]))
        rotary: Any = MiniMaxM3VLRotaryEmbedding
        turned = rotary(config)(x[None], positions[None])
        want = theirs(x[None], turned, None, position_ids=positions[None])[0][0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
