"""Combinations that cannot work are refused before any GPU is touched, all of them at once."""

import hashlib
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from moba_train.cli import app
from moba_train.config.load import dump_config, load_config
from moba_train.config.mesh import mesh_sizes
from moba_train.config.run import CPTransport
from moba_train.config.stages import resolve_stages
from moba_train.data.indexed import IndexedDatasetWriter
from moba_train.errors import ConfigError
from moba_train.validation.data import tokenizer_problems
from moba_train.validation.recipe import validate


def problems(config, *args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(config, *args, **kwargs)
    return caught.value.problems


def test_the_recipe_itself_is_valid_on_the_world_sizes_it_divides_into(load):
    for world_size in (None, 1, 2, 4, 8):
        validate(load(), world_size)


@pytest.mark.parametrize("transport", ["auto", *get_args(CPTransport)])
def test_what_a_valid_recipe_is_written_as_is_valid(load, write, transport):
    """A checkpoint holds it with every key, and evaluation begins there."""
    layers = ["stages.1.attention.full_layers=none"] if transport == "dispatch" else []
    config = load("parallel.cp=2", f"stages.1.parallel={{cp_transport: {transport}}}", *layers)
    validate(config, 2)
    validate(load_config(write("dumped.yaml", dump_config(config))), 2)


def test_an_implementation_that_cannot_run_where_the_run_trains_is_refused(load):
    config = load("optim.implementation=apex")
    validate(config)  # the device is not known
    validate(config, device="cpu", training=False)
    assert problems(config, device="cpu") == [
        "optim.implementation: given 'apex', which cannot run: the run trains on cpu, a GPU needed; set torch"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.kv_heads=3"], "model.kv_heads: given 3, which does not divide heads 4; allowed: 1, 2, 4"),
        (["model.hidden_size=130"], "model.heads: given 4, which does not divide hidden_size 130"),
        (["model.head_dim=33"], "model.head_dim: gives heads of width 33; allowed: even widths"),
        (["model.hidden_size=132"], "model.hidden_size / model.heads: gives heads of width 33"),
        (["stages.1.name=short"], "stages[0].name and stages[1].name: given 'short' 2 times"),
        (
            ["batch_tokens=60K"],
            "batch_tokens: given 61440; stage 'long' needs a multiple of seq_len 8192; nearest: 57344 or 65536",
        ),
        (
            ["stages.1.batch_tokens=24K", "stages.1.micro_batch_size=2"],
            "stages[1].batch_tokens: given 24576; stage 'long' needs a multiple of seq_len 8192 x micro_batch_size 2 "
            "= 16384; nearest: 16384 or 32768",
        ),
        (["stages.1.batch_tokens=2K"], "stages[1].batch_tokens: given 2048; stage 'long' needs a multiple of seq_len"),
        (
            ["optim.kind=muon", "optim.implementation=deepspeed_cpu"],
            "optim.implementation: given 'deepspeed_cpu' with optim.kind: muon, whose part of AdamW is torch's",
        ),
        (
            ["memory.gpu_gib=80", "activation_checkpointing=full"],
            "memory.gpu_gib: given 80 with activation_checkpointing: full, which it does not change; allowed: null",
        ),
        (
            ["memory.host_gib=80"],
            "memory.host_gib: given 80 without activation_offload, which it limits; allowed: null",
        ),
        (["model.rope.factor=2"], "model.rope.factor: given 2, which kind 'none' does not use; set kind: pi"),
        (["stages.1.rope.kind=yarn"], "stages[1].rope.original_seq_len: missing; kind yarn needs"),
        (
            ["stages.1.rope={kind: yarn, original_seq_len: 2K, beta_fast: 1}"],
            "stages[1].rope.beta_fast: given 1; allowed: more than beta_slow, 1",
        ),
        (["stages.1.rope.kind=abf"], "stages[1].rope.factor: given 4, which kind 'abf' does not use"),
        (["parallel.dp_shard=0"], "parallel.dp_shard: given 0; allowed: >= 1, or -1"),
        (["parallel.dp_replicate=-1"], "parallel: dp_replicate and dp_shard are both -1"),
        (
            ["parallel={cp: 4, cp_transport: ulysses}", "model.heads=6", "model.head_dim=16"],
            "parallel.cp_transport: in stage 'short': 'ulysses' cannot share 6 query heads among 4 ranks; use",
        ),
        (
            ["stages.1.parallel={cp: 4, cp_transport: ulysses}", "attention.moba.select=group"],
            "stages[1].parallel.cp_transport: in stage 'long': 'ulysses' would split the query heads of 2 key/value",
        ),
        (
            ["parallel.cp=4096", "batch_tokens=256K"],
            "parallel.cp: given 4096 in stage 'short', whose micro-batches have 2048 tokens; allowed: at most seq_len",
        ),
        (
            ["parallel={cp: 2, cp_ring_depth: 3}", "stages.1.parallel.cp_transport=allgather"],
            "parallel.cp_ring_depth: given 3 in stage 'long', which cp_transport 'allgather' does not use",
        ),
        (
            ["parallel={cp: 2, cp_slices: 1}", "stages.1.parallel.cp_transport=ulysses"],
            "parallel.cp_slices: given 1 in stage 'long', which cp_transport 'ulysses' does not use",
        ),
        (
            ["stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=[2,3]"],
            "stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', which sends queries to the owners of "
            "the blocks that they select; kind 'full' (layers 2-3) cannot be divided so",
        ),
        (
            ["parallel={cp: 2, cp_slices: 2}", "stages.1.parallel.cp_transport=dispatch"],
            "parallel.cp_slices: given 2 in stage 'long', which cp_transport 'dispatch' does not use",
        ),
        (
            ["evaluation.position_wise={bucket: 3K}", "data.validation=[{path: v}]"],
            "evaluation.position_wise.bucket: given 3072, which does not divide stages[0].seq_len 2048",
        ),
        (["evaluation.position_wise={}"], "evaluation.position_wise: needs documents to evaluate on; set data.vali"),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}"],
            "stages[1].until: trailing_loss is not evaluated; set evaluation.position_wise",
        ),
        (
            ["stages.1.until={metric: eval_loss, at_most: 2, max_tokens: 9M}"],
            "stages[1].until: eval_loss is not evaluated; set data.validation",
        ),
        (
            ["stages.1.until={metric: trailing_los, at_most: 2, max_tokens: 9M}"],
            "stages[1].until.metric: given 'trailing_los', which no evaluation gives (did you mean 'trailing_loss'?)",
        ),
        (
            [
                "stages.0.until={metric: trailing_gap, at_most: 2, max_tokens: 9M}",
                "evaluation.position_wise={}",
            ],
            "stages[0].until.metric: given 'trailing_gap', but stage 'short' has no other than full layers, so there",
        ),
        (
            ["stages.1.until={max_tokens: 9M}"],
            "stages[1].until: no criterion given; allowed: trailing_loss_recovered, or metric with at_most or at_least",
        ),
        (
            ["stages.1.until={metric: eval_loss, max_tokens: 9M}"],
            "stages[1].until: given metric with no bound; allowed: metric with either at_most or at_least",
        ),
        (
            ["stages.1.until={metric: eval_loss, at_most: 2, at_least: 1, max_tokens: 9M}"],
            "stages[1].until: given metric with at_most and at_least; allowed: metric with either",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, metric: eval_loss, max_tokens: 9M}"],
            "stages[1].until: given trailing_loss_recovered and metric; allowed: one criterion",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 2M}"],
            "stages[1].until.max_tokens: given 2000000; allowed: more than the stage's tokens 2000000",
        ),
        (
            ["stages.0.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}"],
            "stages[0].until.trailing_loss_recovered.reference: given 'full', but stage 'short' has no other than full",
        ),
        (
            ["stages.1.until={trailing_loss_recovered: {tolerance: 0, reference: before}, max_tokens: 9M}"],
            "stages[1].until.trailing_loss_recovered.reference: given 'before', but no stage before 'long' ends with",
        ),
        (
            [
                "stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}",
                "optim.schedule.min_lr_ratio=0",
            ],
            "stages[1].until: beyond its tokens the stage would go on with the learning rate at their end, which is 0",
        ),
        (["optim.schedule.kind=wsd"], "optim.schedule.decay_tokens: missing; kind wsd needs"),
        (
            ["optim.schedule.decay_tokens=1M"],
            "optim.schedule.decay_tokens: given 1000000, which kind 'cosine' does not",
        ),
        (
            ["optim.schedule={kind: wsd, warmup_tokens: 2M, decay_tokens: 2M}"],
            "optim.schedule: warmup_tokens 2000000 + decay_tokens 2000000 do not fit in the 3080192 tokens of the run",
        ),
        (
            ["stages.0.schedule.warmup_tokens=2M"],
            "stages[0].schedule: warmup_tokens 2000000 do not fit in the 1048576 tokens of stage 'short'",
        ),
        (["stages.0.schedule.kind=wsd"], "stages[0].schedule.decay_tokens: missing"),
        (
            ["optim.schedule.warmup_tokens=1.5M", "stages.0.lr=1e-3"],
            "optim.schedule: warmup_tokens 1500000 do not fit in the 1048576 tokens of stage 'short', whose lr",
        ),
        (
            ["attention.default=mobba"],
            "attention.default: 'mobba' is not a registered attention (did you mean 'moba'?)",
        ),
        (["attention.full_layers=last:9"], "attention.full_layers: 'last:9' asks for 9 layers; the model has 4"),
        (["attention.overrides.7.topk=1"], "attention.overrides: layer ids [7] do not exist"),
        (
            ["attention.overrides.1.block_sise=1"],
            "attention.overrides.1.block_sise: unknown option (did you mean 'block_size'?)",
        ),
        (["attention.overrides.1.topk=0"], "attention.overrides.1.topk: given 0; allowed: integer >= 1"),
        (["attention.overrides.1.kind=[a]"], "attention.overrides.1.kind: ['a'] is not a registered attention"),
        (["stages.1.attention.default=x"], "stages[1].attention.default: 'x' is not a registered attention"),
        (
            ["attention.moba.block_size=16384"],
            "stages[1].attention.moba.block_size: given 16384 in layers 0-2, which does not fit in a sequence of 8192",
        ),
        (
            ["attention.moba.always=[previous, first]"],
            "stages[1].attention.moba.topk: given 2 in layer 1, but 3 blocks are always selected (current",
        ),
        (
            ["attention.overrides={3: {topk: 2}}"],
            "attention.overrides.3.topk: given 2, but layer 3 is 'full' in all stages, which has no such option",
        ),
        (
            ["stages.0.attention.overrides={0: {topk: 2}}"],
            "stages[0].attention.overrides.0.topk: given 2, but layer 0 is 'full' in this stage, which has no",
        ),
        (
            ["attention.moba={backend: triton, block_size: 40}"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0-2, which cannot run: head dim 32, 64 or 128",
        ),
        (
            ["attention.moba={backend: triton, block_size: 40}", "model.head_dim=64"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0-2, which cannot run: block_size 40, a",
        ),
        (
            ["attention.moba={backend: triton, topk: 129, block_size: 64}", "model.head_dim=64"],
            "stages[1].attention.moba.backend: given 'triton' in layers 0, 2, which cannot run: 128 selected blocks",
        ),
        (["stages.1.rope.factor=1"], "stages[1].rope.factor: given 1, with which kind 'pi' changes nothing"),
        (
            ["stages.1.rope={kind: yarn, original_seq_len: 2K}"],
            "stages[1].rope.factor: given 1, with which kind 'yarn' changes nothing",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_key(load, overrides, problem):
    assert any(found.startswith(problem) for found in problems(load(*overrides))), problems(load(*overrides))


@pytest.mark.parametrize(
    ("override", "backend", "device"),
    [("attention.full.backend=cudnn", "cudnn", "cpu"), ("attention.full.backend=sdpa", "sdpa", "cuda")],
)
def test_a_backend_is_refused_where_the_run_has_no_such_device(load, override, backend, device):
    needed = {"cpu": "cuda", "cuda": "cpu"}[device]
    config = load(override)
    found = problems(config, device=device)
    assert found[0].startswith(
        f"stages[0].attention.full.backend: given {backend!r} in layers 0-3, which runs on {needed}"
    )
    validate(config, device=needed)
    validate(config)


@pytest.mark.parametrize(
    "override",
    ["attention.overrides={3: {topk: 2}}", "stages.0.attention.overrides={0: {topk: 2}}", "stages.1.rope.factor=1"],
)
def test_a_recipe_that_was_trained_with_may_have_options_that_change_nothing(load, override):
    """Earlier versions did not refuse them, and its checkpoints must stay usable."""
    assert problems(load(override))
    validate(load(override), allow_idle=True)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("precision.compute=fp32", "which computes in 16 bits on CUDA; set precision.compute: bf16"),
        ("model.head_dim=12", "which needs heads of a width of 8, 16, ... or 256 on CUDA; the model's have 12"),
    ],
)
def test_dispatch_is_refused_where_no_kernel_could_attend_on_cuda(load, override, text):
    config = load("stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=none", override)
    (found,) = problems(config, device="cuda")
    assert found.startswith(f"stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', {text}")
    validate(config, device="cpu")


def test_triton_kernels_are_refused_before_the_first_stage_on_a_cpu(load, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = load("attention.moba={backend: triton, block_size: 512}", "model.head_dim=64")
    assert "the run trains on cpu, CUDA needed" in problems(config, device="cpu")[0]
    validate(config, device="cuda")


def test_all_problems_come_at_once_and_only_once(load):
    config = load("model.kv_heads=3", "attention.full_layers=lst:1", "parallel.dp_shard=0", "batch_tokens=1K")
    found = problems(config, world_size=4)
    assert len(found) == len(set(found))
    keys = [text.split(":")[0] for text in found]
    # The stages inherit the recipe's attention, not its complaint; the long stage brings a full_layers of its own.
    assert keys == ["model.kv_heads", "attention.full_layers", "parallel.dp_shard", "batch_tokens", "batch_tokens"]


def test_every_mistake_in_an_attention_is_reported_with_its_key(load):
    config = load(
        "attention={default: mob, full_layers: x, overrides: {0: {kind: y, tokp: 1}, 1: {kind: moba, topk: z}, 9: {}}}"
    )
    found = [text.split(":")[0] for text in problems(config) if text.startswith("attention.")]
    keys = ["default", "full_layers", "overrides", "overrides.0.kind", "overrides.0.tokp", "overrides.1.topk"]
    assert found == [f"attention.{key}" for key in keys]


def test_a_stage_that_corrects_the_recipes_attention_has_no_problem(load):
    config = load("stages.1.attention={moba: {block_size: 8192}}", "stages.0.attention={moba: {block_size: 1024}}")
    assert problems(load("attention.moba.block_size=16384", "stages.0.attention={default: moba}"))
    validate(config)


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "sizes"),
    [(1, -1, 8, (1, 8)), (2, -1, 8, (2, 4)), (-1, 2, 8, (4, 2)), (2, 3, 6, (2, 3)), (1, 1, 1, (1, 1))],
)
def test_minus_one_fills_the_world(load, replicate, shard, world_size, sizes):
    config = load(f"parallel.dp_replicate={replicate}", f"parallel.dp_shard={shard}")
    assert mesh_sizes(config.parallel, world_size) == (1, *sizes, 1, 1)


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "parts"),
    [
        (1, 4, 8, ["make 4 ranks, 8 were started", "more ranks than the layout uses", "dp_replicate: 1, dp_shard: -1"]),
        (
            3,
            4,
            8,
            ["make 12 ranks, 8 were started", "fewer ranks than the layout needs", "dp_replicate: 1, dp_shard: -1"],
        ),
        (3, -1, 8, ["parallel.dp_replicate: given 3", "8 ranks", "allowed: 1, 2, 4, 8"]),
        (-1, 16, 8, ["parallel.dp_shard: given 16", "allowed: 1, 2, 4, 8"]),
    ],
)
def test_a_layout_that_does_not_fit_says_what_would(load, replicate, shard, world_size, parts):
    config = load(f"parallel.dp_replicate={replicate}", f"parallel.dp_shard={shard}")
    with pytest.raises(ConfigError) as caught:
        mesh_sizes(config.parallel, world_size)
    (found,) = caught.value.problems
    assert all(part in found for part in parts), found
    assert found in problems(config, world_size)


@pytest.mark.parametrize(
    ("overrides", "world_size", "problem"),
    [
        (["parallel.cp=3"], 8, "parallel.cp: given 3, which does not divide the 8 ranks; allowed: 1, 2, 4, 8"),
        (["stages.1.parallel.cp=16"], 8, "stages[1].parallel.cp: given 16, which does not divide the 8 ranks"),
        (
            ["parallel={cp: 4, dp_replicate: 4}"],
            8,
            "parallel.dp_replicate: given 4, which does not divide the 8 ranks, 4 to a sequence (parallel.cp); "
            "allowed: 1, 2",
        ),
        (
            ["parallel={cp: 2, dp_shard: 2, dp_replicate: 1}"],
            8,
            "parallel: dp_replicate 1, dp_shard 2, cp 2 make 4 ranks, 8 were started, 2 to a sequence (parallel.cp)",
        ),
        (
            ["parallel={dp_replicate: -1, dp_shard: 2}", "stages.1.parallel.cp=2"],
            8,
            "stages[1].parallel.cp: given 2, which makes dp_replicate 2, but the weights stay sharded as in the first",
        ),
        (
            ["parallel={cp: 8, cp_transport: hierarchical}"],
            8,
            "parallel.cp_transport: in stage 'short': 'hierarchical' needs several nodes",
        ),
    ],
)
def test_a_sharing_of_sequences_that_does_not_fit_is_refused(load, overrides, world_size, problem):
    found = problems(load(*overrides), world_size, ranks_per_node=8)
    assert any(text.startswith(problem) for text in found), found


def test_stages_may_share_sequences_among_different_numbers_of_ranks(load):
    config = load("stages.1.parallel={cp: 4, cp_transport: ring}", "parallel.dp_replicate=2")
    validate(config, 16, ranks_per_node=8)
    short, long = (stage.parallel for stage in resolve_stages(config))
    assert mesh_sizes(short, 16) == (1, 2, 8, 1, 1)
    assert mesh_sizes(long, 16) == (1, 2, 2, 4, 1)
    assert mesh_sizes(short, 16).shards == mesh_sizes(long, 16).shards
    # What is read at the same time is divided by cp, so a batch for 8 ranks of 8K tokens now fits on 32.
    validate(load("stages.1.parallel.cp=4"), 32, ranks_per_node=8)


@pytest.mark.parametrize(
    ("overrides", "world_size", "problem"),
    [
        (
            ["parallel.tp=4", "model.vocab_size=2050"],
            8,
            "parallel.tp: given 4, which does not divide model.kv_heads 2, model.vocab_size 2050; allowed: 1, 2",
        ),
        (
            ["parallel.tp=2", "model.intermediate_size=385"],
            8,
            "parallel.tp: given 2, which does not divide model.inter",
        ),
        (
            ["parallel.tp=16", "model.heads=16", "model.kv_heads=16"],
            16,
            "parallel.tp: given 16, which does not divide the 8 ranks of a node; a tp group must not span nodes; ",
        ),
        (["parallel.tp_overlap=true"], 2, "parallel.tp_overlap: given true, but parallel.tp is 1; it needs"),
        (["parallel.tp=2", "parallel.tp_overlap=true"], 2, "parallel.tp_overlap: given true, but compile is false"),
        (["parallel.tp=2"], 5, "parallel.tp: given 2, which does not divide the 5 ranks; allowed: 1, 5"),
        (
            ["parallel={tp: 2, cp: 2}"],
            6,
            "parallel.cp: given 2, which does not divide the 6 ranks in groups of 2 (parallel.tp); allowed: 1, 3",
        ),
        (
            ["parallel={tp: 2, cp: 2, dp_shard: 1}"],
            8,
            "parallel: dp_replicate 1, dp_shard 1, cp 2, tp 2 make 4 ranks, 8 were started",
        ),
        (
            ["parallel={tp: 2, cp: 2, cp_transport: ulysses}", "model.heads=2"],
            8,
            "parallel.cp_transport: in stage 'short': 'ulysses' cannot share 1 query heads among 2 ranks",
        ),
        (
            ["parallel={tp: 2, cp: 3}"],
            6,
            "parallel.tp: given 2, which does not divide the 683 rows of seq_len 2048 x micro_batch_size 1 over cp 3 "
            "in stage 'short'; make them a multiple of 12 tokens",
        ),
        (
            [
                "parallel.tp=2",
                "stages.0.seq_len=2049",
                "stages.0.micro_batch_size=2",
                "data.validation=[{path: corpora/a}]",
                "evaluation.position_wise={bucket: 1}",
            ],
            8,
            "parallel.tp: given 2, which does not divide the 2049 rows of seq_len 2049 (evaluation.position_wise) in",
        ),
    ],
)
def test_a_sharing_of_layers_that_does_not_fit_is_refused(load, overrides, world_size, problem):
    found = problems(load(*overrides), world_size, ranks_per_node=8)
    assert any(text.startswith(problem) for text in found), found


def test_shared_layers_are_of_the_run_not_of_a_stage(load):
    config = load("parallel={tp: 2, dp_replicate: 2}", "stages.1.parallel={cp: 4}")
    validate(config, 16, ranks_per_node=8)
    assert [mesh_sizes(stage.parallel, 16) for stage in resolve_stages(config)] == [(1, 2, 4, 1, 2), (1, 2, 1, 4, 2)]
    with pytest.raises(ConfigError, match=r"stages\[1\]\.parallel\.tp: unknown key; .* at parallel\.tp"):
        load("parallel.tp=2", "stages.1.parallel.tp=1")


def test_the_batch_must_divide_over_the_ranks(load):
    (found,) = [text for text in problems(load(), world_size=16) if "long" in text]
    assert "needs a multiple of seq_len 8192 x 16 data-parallel ranks = 131072; nearest: 131072" in found


def test_looking_for_files_leaves_the_other_problems_their_path(load):
    found = problems(load("attention.default=mobba"), check_files=True)
    assert any(text.startswith("attention.default: 'mobba' is not") for text in found)


def test_missing_files_are_named_with_their_key(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpora").mkdir()
    for name in ("a.bin", "a.idx", "b.bin"):
        (tmp_path / "corpora" / name).touch()
    with IndexedDatasetWriter(tmp_path / "corpora" / "a", np.uint16) as writer:
        writer.add_document([1, 2])
    config = load("data.tokenizer=tok.model", "stages.1.train=[{path: late}]", "data.validation=[{path: corpora/a}]")
    validate(config)
    found = problems(config, check_files=True)
    assert [text.split(":")[0] for text in found] == ["data.train[1].path", "stages[1].train[0].path", "data.tokenizer"]
    assert "no file corpora/b.idx" in found[0]
    assert "late.bin and late.idx" in found[1]


def corpus(path, tokenizer, content):
    info = {"tokenizer": tokenizer, "tokenizer_sha256": hashlib.sha256(content).hexdigest(), "vocab_size": 9}
    with IndexedDatasetWriter(path, np.uint16, info) as writer:
        writer.add_document([1, 2, 3])


def test_corpora_of_different_tokenizers_are_refused_and_both_are_named(load, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "one", "tok.model", b"one")
    corpus(tmp_path / "same", "moved.model", b"one")
    corpus(tmp_path / "other", "other.json", b"other")
    with IndexedDatasetWriter(tmp_path / "megatron", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    fits = "data.train=[{path: one}, {path: same}, {path: megatron}]"
    validate(load(fits), check_files=True)
    mixed = load(fits, "stages.1.train=[{path: one}, {path: other}]")
    (found,) = problems(mixed, check_files=True)
    assert found.startswith(
        "stages[1].train[1].path: the corpus other was made with the tokenizer other.json (SHA-256 "
    )
    assert "but the corpus one with tok.model (SHA-256 " in found
    done = CliRunner().invoke(app, ["plan", str(recipe), fits, "stages.1.train=[{path: other}]"])
    assert done.exit_code == 2
    assert "the corpus other was made with the tokenizer other.json" in done.stderr


def test_a_corpus_of_another_tokenizer_than_the_recipes_is_refused(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "one", "tok.model", b"one")
    (tmp_path / "tok.model").write_bytes(b"one")
    config = load("data={train: [{path: one}], tokenizer: tok.model}")
    assert list(tokenizer_problems(config)) == []
    (tmp_path / "tok.model").write_bytes(b"trained again")
    (found,) = tokenizer_problems(config)
    assert "data.train[0].path: the corpus one was made with the tokenizer tok.model" in found
    assert "but data.tokenizer is tok.model" in found


def test_a_bad_corpus_of_a_later_stage_is_named_before_the_first_begins(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, token in (("good", 1), ("bad", 60_000)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document([token] * 9)
    config = load("data.train=[{path: good}]", "stages.1.train=[{path: bad}]", "data.validation=[]")
    (found,) = problems(config, check_files=True)
    assert found.startswith("stages[1].train[0].path: corpus bad: document 0 has token id 60000 at offset 0")
    assert f"model.vocab_size is {config.model.vocab_size}" in found
