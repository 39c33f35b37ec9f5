"""FLOPs of training: the standard formula, and what every kind of attention really computes in packed documents."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from data_tools.corpus_writer import IndexedDatasetWriter
from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.registry import KINDS
from moba_train.config.attention import AttentionConfig, resolve_layers
from moba_train.config.model import ModelConfig
from moba_train.config.parallel import ParallelConfig
from moba_train.config.schema import RunConfig
from moba_train.data.loader import step_batches, training_data
from moba_train.memory import flops as documents
from moba_train.memory.flops import dense_flops, layer_flops, matmul_flops, real_flops, repeated_flops
from moba_train.parallel.activations import Kept
from moba_train.parallel.world import World
from moba_train.run.step import batch_flops, throughput
from tests.resolved import plan_of, samples_of, stages_of

if TYPE_CHECKING:
    from moba_train.tools.plan.plan import StagePlan

LLAMA_8B = ModelConfig(vocab_size=128256, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8)
LENGTHS = st.lists(st.integers(0, 120), min_size=1, max_size=6)


def real(lengths: list[int], **attention: Any) -> float:
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
def test_pairs_of_moba_are_those_counted_one_by_one(lengths: list[int], block_size: int, topk: int) -> None:
    assert moba(block_size, topk).pairs(LLAMA_8B, lengths) == pytest.approx(counted_pairs(lengths, block_size, topk))


@given(lengths=LENGTHS)
def test_pairs_of_full_attention_are_those_counted_one_by_one(lengths: list[int]) -> None:
    full = FullKind(FullKind.Options(), LLAMA_8B.head_width)
    assert full.pairs(LLAMA_8B, lengths) == pytest.approx(counted_pairs(lengths, 200, 1))


@given(length=st.integers(1, 10**6), blocks=st.integers(1, 64))
def test_selecting_every_block_is_dense_attention(length: int, blocks: int) -> None:
    assert moba(-(-length // blocks), blocks).pairs(LLAMA_8B, [length]) == pytest.approx(length**2 / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_cost_what_they_cost_apart(kind: str) -> None:
    """Every kind counts documents by their own lengths, so no pair is counted across a boundary. The work of kinds with
    a state does not depend on the boundaries."""
    attention = KINDS[kind](KINDS[kind].Options(), LLAMA_8B.head_width)
    lengths = [70_000, 1, 4096, 12_345]
    apart = sum(attention.flops(LLAMA_8B, [length]) for length in lengths)
    assert attention.flops(LLAMA_8B, lengths) == pytest.approx(apart)
    assert attention.flops(LLAMA_8B, lengths) <= attention.flops(LLAMA_8B, [sum(lengths)])
    assert attention.pairs(LLAMA_8B, lengths) < attention.pairs(LLAMA_8B, [sum(lengths)])


def test_the_dense_formula_is_six_per_weight_plus_half_of_full_attention() -> None:
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without the embedding lookup and the norms
    assert dense_flops(LLAMA_8B, 8192) == 6 * weights + 12 * 32 * 32 * 128 * 8192 / 2


def test_real_equals_dense_for_one_full_document_and_up_to_the_gate_when_every_block_is_selected() -> None:
    dense = 65536 * dense_flops(LLAMA_8B, 65536)
    assert real([65536], default="full") == dense
    gates = 32 * 65536 * LLAMA_8B.heads * LLAMA_8B.head_width * 16  # 2 H d a block, 16 blocks, half behind a query
    assert real([65536], moba={"block_size": 4096, "topk": 16}) == pytest.approx(dense + gates, rel=1e-12)


def test_many_short_documents_are_not_one_long_one() -> None:
    """64 documents of 1K in a sequence of 64K: the attention of a 64K document would be 64 times theirs."""
    attention_of = {name: real(lengths, default="full") for name, lengths in (("one", [2**16]), ("many", [2**10] * 64))}
    matmul = 2**16 * matmul_flops(LLAMA_8B)
    assert attention_of["one"] - matmul == pytest.approx(64 * (attention_of["many"] - matmul))


def test_a_layer_repeats_a_forward_pass_less_what_it_keeps() -> None:
    """A forward pass is a third of training's operations. The down projection's result is needed by no gradient."""
    config = RunConfig.model_validate(
        {
            "name": "a",
            "run_dir": "a",
            "model": LLAMA_8B.model_dump(),
            "attention": {"default": "full"},
            "data": {"train": [{"path": "a"}]},
            "batch_tokens": 8192,
            "stages": [{"name": "only", "seq_len": 8192, "tokens": 8192}],
        }
    )
    (stage,) = stages_of(config)
    attention = 4 * 4096 * 8192 / 2
    projections = 2 * (2 * 4096**2 + 2 * 4096 * 1024)
    gate_and_up = 2 * 2 * 4096 * 14336
    repeated = {kept: repeated_flops(LLAMA_8B, stage, 0, kept) for kept in Kept}
    assert repeated == pytest.approx(
        {
            Kept.INPUT: attention + projections + gate_and_up,
            Kept.ATTENTION: projections + gate_and_up,
            Kept.PROJECTIONS: gate_and_up,
            Kept.PRODUCTS: 0,
            Kept.ALL: 0,
        }
    )


def test_each_layer_counts_as_what_it_is() -> None:
    options = {"block_size": 4096, "topk": 12}
    sparse, dense = real([2**20], moba=options), real([2**20], default="full")
    hybrid = real([2**20], moba=options, full_layers="last:3")
    assert hybrid == pytest.approx((29 * sparse + 3 * dense) / 32)
    assert sparse < hybrid < dense


def test_sparse_attention_saves_what_the_design_table_says() -> None:
    """Forward pass of one layer at 1M tokens, H = 32, d = 128: dense 9007 TFLOP, 4096/12 791 and a gate of 1.1."""
    heads, tokens = 32 * 128, 2**20
    pairs = moba(4096, 12).pairs(LLAMA_8B, [tokens])
    assert 4 * heads * (tokens**2 / 2) / 1e12 == pytest.approx(9007, rel=1e-3)
    assert 4 * heads * pairs / 1e12 == pytest.approx(791, rel=0.03)
    gate = moba(4096, 12).flops(LLAMA_8B, [tokens]) - 12 * heads * pairs
    assert gate / 1e12 == pytest.approx(1.1, rel=0.03)


BLOCK_SIZE, TOPK, SEQ_LEN = 16, 3, 256


def write_corpus(prefix: Path, seed: int) -> str:
    """Documents of 1 to 600 tokens: many shorter than a block, some longer than a sequence."""
    lengths = np.random.default_rng(seed).choice([1, 5, 17, 40, 90, 250, 600], size=60)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        for length in lengths:
            writer.add_document(np.arange(length) % 64)
    return str(prefix)


def packed_run(folder: Path, packing: str) -> RunConfig:
    """One stage of a full and two MoBA layers on a blend of two corpora: 2 steps of 8 sequences."""
    return RunConfig.model_validate(
        {
            "name": "packed",
            "run_dir": str(folder / "run"),
            "model": {
                "vocab_size": 64,
                "hidden_size": 32,
                "intermediate_size": 48,
                "layers": 3,
                "heads": 4,
                "kv_heads": 2,
            },
            "attention": {"moba": {"block_size": BLOCK_SIZE, "topk": TOPK}, "full_layers": "last:1"},
            "data": {
                "train": [
                    {"path": write_corpus(folder / "one", 1)},
                    {"path": write_corpus(folder / "two", 2), "weight": 2},
                ],
                "packing": packing,
            },
            "batch_tokens": 8 * SEQ_LEN,
            "stages": [{"name": "only", "seq_len": SEQ_LEN, "tokens": 16 * SEQ_LEN}],
        }
    )


def planned(config: RunConfig) -> "StagePlan":
    (stage,) = plan_of(config, 1).stages
    return stage


def brute_force_flops(model: ModelConfig, document_of_token: list[int]) -> float:
    """FLOPs of a full and two MoBA layers, counted query by query over tokens that name their document.

    A pair of a query and an attended key costs 12 d a head, a block that MoBA's gate scores 2 d; a query's own key
    counts half, and the gate scores half of the document's blocks for every query.
    """
    width = model.heads * model.head_width
    total = matmul_flops(model) * len(document_of_token)
    for query, document in enumerate(document_of_token):
        keys = [key for key in range(query + 1) if document_of_token[key] == document]
        first = keys[0]
        own_block = (query - first) // BLOCK_SIZE
        in_own_block = [key for key in keys if (key - first) // BLOCK_SIZE == own_block]
        selected = min(TOPK - 1, own_block) * BLOCK_SIZE
        blocks = -(-document_of_token.count(document) // BLOCK_SIZE)
        total += 12 * width * (len(keys) - 0.5)
        total += 2 * (12 * width * (len(in_own_block) - 0.5 + selected) + 2 * width * blocks / 2)
    return total


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_plan_and_throughput_agree_with_a_count_over_real_batches(tmp_path: Path, packing: str) -> None:
    config = packed_run(tmp_path, packing)
    (stage,) = stages_of(config)
    data = training_data(samples_of(config), stage, {})
    batches = [batch for first in (0, 8) for batch in step_batches(data, first, 8, 2, dp_rank=0, dp_size=1)]
    counted = 0.0
    for batch in batches:
        # A document begins where positions return to 0.
        documents_T = (batch.positions == 0).cumsum(0).tolist()
        counted += brute_force_flops(config.model, documents_T)
    stage_plan = planned(config)
    assert batch_flops(config.model, stage, batches) == pytest.approx(counted, rel=1e-12)
    assert stage_plan.real_flops * 16 * SEQ_LEN == pytest.approx(counted, rel=1e-12)
    assert len({batch.padding > 0 for batch in batches}) == (2 if packing == "best_fit" else 1)


def test_utilisation_is_a_share_of_the_peak_of_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = packed_run(tmp_path, "concat")
    (stage,) = stages_of(config)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": 7})
    world = World(0, 4, torch.device("cuda"), 4, timedelta(seconds=1), dist.HashStore())
    dense = dense_flops(config.model, SEQ_LEN) * stage.batch_tokens
    assert throughput(config.model, stage, world, step_s=2.0, step_flops=312e12) == pytest.approx(
        {
            "tokens_per_s": 8 * SEQ_LEN / 2,
            "tokens_per_s_per_device": 8 * SEQ_LEN / 2 / 4,
            "memory_gib": 3,
            "reserved_gib": 5,
            "allocator_retries": 7,
            "mfu": 1 / 2 / 4,
            "mfu_dense": dense / 312e12 / 2 / 4,
        }
    )


def test_a_plan_without_corpora_counts_one_document_per_sequence(tmp_path: Path) -> None:
    config = packed_run(tmp_path, "concat")
    by_documents = planned(config)
    (tmp_path / "two.bin").unlink()
    by_sequences = planned(config)
    assert by_documents.documents.source == "documents of the corpora"
    assert by_sequences.documents.source == "one document per sequence: corpora not found"
    (stage,) = stages_of(config)
    assert by_sequences.real_flops == real_flops(config.model, stage.attention, [SEQ_LEN]) / SEQ_LEN
    assert by_documents.real_flops < by_sequences.real_flops


def test_time_of_attention_is_counted_by_documents(tmp_path: Path) -> None:
    config = packed_run(tmp_path, "concat")
    config = config.model_copy(update={"parallel": ParallelConfig(cp=2)})
    plan = plan_of(config, 2)
    rates = plan.machine.rates
    seconds = 0.0
    for layer in plan.stages[0].stage.attention:
        flops = layer_flops(config.model, layer, plan.stages[0].documents.lengths)
        seconds += flops / rates.attention_rate(layer, config.model.head_width, SEQ_LEN).both / rates.attention_in_step
    assert plan.steps[0].time.attention == pytest.approx(seconds / 2 / 2)  # of 16 sequences 8, on 2 ranks


def test_a_plan_reads_a_bounded_number_of_sequences_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = packed_run(tmp_path, "concat")
    (stage,) = stages_of(config)
    data = training_data(samples_of(config), stage, {})
    for tokens, most, sequences in ((5 * SEQ_LEN + 1, 9, 5), (SEQ_LEN - 1, 9, 1), (9 * SEQ_LEN, 3, 3)):
        monkeypatch.setattr(documents, "READ_TOKENS", tokens)
        monkeypatch.setattr(documents, "READ_SEQUENCES", most)
        expected = [length for index in range(sequences) for length in data.sample(index).lengths]
        assert documents.stage_documents(samples_of(config), stage).lengths == tuple(expected)
