"""FLOPs per token: the standard formula, and what MoBA really does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.planning.flops import dense_flops, dense_keys, gate_flops, moba_keys, real_flops

LLAMA_8B = ModelConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8)


def real(seq_len: int, **attention) -> float:
    return real_flops(LLAMA_8B, resolve_layers(AttentionConfig.model_validate(attention), LLAMA_8B.layers), seq_len)


def brute_force_keys(seq_len: int, block_size: int, topk: int) -> float:
    """Count keys query by query; a query's own key counts half."""
    keys = 0.0
    for position in range(seq_len):
        own_block, inside = divmod(position, block_size)
        keys += inside + 0.5 + min(topk - 1, own_block) * block_size
    return keys / seq_len


@given(seq_len=st.integers(1, 300), block_size=st.integers(1, 64), topk=st.integers(1, 12))
def test_keys_of_moba_are_those_counted_one_by_one(seq_len, block_size, topk):
    assert moba_keys(seq_len, block_size, topk) == pytest.approx(brute_force_keys(seq_len, block_size, topk))


@given(seq_len=st.integers(1, 10**6), blocks=st.integers(1, 64))
def test_selecting_every_block_is_dense_attention(seq_len, blocks):
    block_size = -(-seq_len // blocks)
    assert moba_keys(seq_len, block_size, blocks) == pytest.approx(dense_keys(seq_len))


def test_the_dense_formula_is_six_per_weight_plus_half_of_full_attention():
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the embedding lookup and the norms
    assert dense_flops(LLAMA_8B, 8192) == 6 * weights + 12 * 32 * 32 * 128 * 8192 / 2


def test_real_equals_dense_without_moba_and_up_to_the_gate_when_every_block_is_chosen():
    assert real(65536, default="full") == dense_flops(LLAMA_8B, 65536)
    gates = 32 * gate_flops(LLAMA_8B, 65536, 4096)
    assert real(65536, moba={"block_size": 4096, "topk": 16}) == pytest.approx(
        dense_flops(LLAMA_8B, 65536) + gates, rel=1e-12
    )


def test_each_layer_counts_as_what_it_is():
    options = {"block_size": 4096, "topk": 12}
    sparse, dense = real(2**20, moba=options), real(2**20, default="full")
    hybrid = real(2**20, moba=options, full_layers="last:3")
    assert hybrid == pytest.approx((29 * sparse + 3 * dense) / 32)
    assert sparse < hybrid < dense


def test_sparse_attention_saves_what_the_design_table_says():
    """Forward pass of one layer at 1M tokens, H = 32, d = 128: dense 9007 TFLOP, 4096/12 791 + 1.1 (attention.md)."""
    heads, tokens = 32 * 128, 2**20
    assert 4 * heads * dense_keys(tokens) * tokens / 1e12 == pytest.approx(9007, rel=1e-3)
    assert 4 * heads * moba_keys(tokens, 4096, 12) * tokens / 1e12 == pytest.approx(791, rel=0.03)
    assert gate_flops(LLAMA_8B, tokens, 4096) * tokens / 1e12 == pytest.approx(1.1, rel=0.03)
