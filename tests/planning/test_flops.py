"""FLOPs of training: the standard formula, and what every kind of attention really computes in packed documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moba_train.attention.full.kind import FullKind
from moba_train.attention.moba.kind import MobaKind
from moba_train.attention.registry import KINDS
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.planning.flops import dense_flops, matmul_flops, real_flops

LLAMA_8B = ModelConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8)
LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=6)


def real(lengths: list[int], **attention) -> float:
    layers = resolve_layers(AttentionConfig.model_validate(attention), LLAMA_8B.layers)
    return real_flops(LLAMA_8B, layers, lengths)


def moba(block_size: int, topk: int) -> MobaKind:
    return MobaKind(MobaKind.Options(block_size=block_size, topk=topk), LLAMA_8B.head_width)


def counted_pairs(lengths: list[int], block_size: int, topk: int) -> float:
    """Keys counted query by query in every document; a query's own key counts half."""
    pairs = 0.0
    for length in lengths:
        for position in range(length):
            own_block, inside = divmod(position, block_size)
            pairs += inside + 0.5 + min(topk - 1, own_block) * block_size
    return pairs


@given(lengths=LENGTHS, block_size=st.integers(1, 64), topk=st.integers(1, 12))
def test_pairs_of_moba_are_those_counted_one_by_one(lengths, block_size, topk):
    assert moba(block_size, topk).attended_pairs(lengths) == pytest.approx(counted_pairs(lengths, block_size, topk))


@given(lengths=LENGTHS)
def test_pairs_of_full_attention_are_those_counted_one_by_one(lengths):
    full = FullKind(FullKind.Options(), LLAMA_8B.head_width)
    assert full.attended_pairs(lengths) == pytest.approx(counted_pairs(lengths, 200, 1))


@given(length=st.integers(1, 10**6), blocks=st.integers(1, 64))
def test_selecting_every_block_is_dense_attention(length, blocks):
    assert moba(-(-length // blocks), blocks).attended_pairs([length]) == pytest.approx(length**2 / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_cost_what_they_cost_apart(kind):
    """Every kind counts documents by their own lengths, so no pair is counted across a boundary."""
    attention = KINDS[kind](KINDS[kind].Options(), LLAMA_8B.head_width)
    lengths = [70_000, 1, 4096, 12_345]
    apart = sum(attention.flops(LLAMA_8B, [length]) for length in lengths)
    assert attention.flops(LLAMA_8B, lengths) == pytest.approx(apart)
    assert attention.flops(LLAMA_8B, lengths) < attention.flops(LLAMA_8B, [sum(lengths)])


def test_the_dense_formula_is_six_per_weight_plus_half_of_full_attention():
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the embedding lookup and the norms
    assert dense_flops(LLAMA_8B, 8192) == 6 * weights + 12 * 32 * 32 * 128 * 8192 / 2


def test_real_equals_dense_for_one_full_document_and_up_to_the_gate_when_every_block_is_selected():
    dense = 65536 * dense_flops(LLAMA_8B, 65536)
    assert real([65536], default="full") == dense
    gates = 32 * 65536 * LLAMA_8B.heads * LLAMA_8B.head_width * 16  # 2 H d a block, 16 blocks, half behind a query
    assert real([65536], moba={"block_size": 4096, "topk": 16}) == pytest.approx(dense + gates, rel=1e-12)


def test_many_short_documents_are_not_one_long_one():
    """64 documents of 1K in a sequence of 64K: the attention of a 64K document would be 64 times theirs."""
    attention_of = {name: real(lengths, default="full") for name, lengths in (("one", [2**16]), ("many", [2**10] * 64))}
    matmul = 2**16 * matmul_flops(LLAMA_8B)
    assert attention_of["one"] - matmul == pytest.approx(64 * (attention_of["many"] - matmul))


def test_each_layer_counts_as_what_it_is():
    options = {"block_size": 4096, "topk": 12}
    sparse, dense = real([2**20], moba=options), real([2**20], default="full")
    hybrid = real([2**20], moba=options, full_layers="last:3")
    assert hybrid == pytest.approx((29 * sparse + 3 * dense) / 32)
    assert sparse < hybrid < dense


def test_sparse_attention_saves_what_the_design_table_says():
    """Forward pass of one layer at 1M tokens, H = 32, d = 128: dense 9007 TFLOP, 4096/12 791 and a gate of 1.1."""
    heads, tokens = 32 * 128, 2**20
    pairs = moba(4096, 12).attended_pairs([tokens])
    assert 4 * heads * (tokens**2 / 2) / 1e12 == pytest.approx(9007, rel=1e-3)
    assert 4 * heads * pairs / 1e12 == pytest.approx(791, rel=0.03)
    gate = moba(4096, 12).flops(LLAMA_8B, [tokens]) - 12 * heads * pairs
    assert gate / 1e12 == pytest.approx(1.1, rel=0.03)
