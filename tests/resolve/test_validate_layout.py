"""Layouts that do not fit the ranks, the model or the sequences are refused, and say what would fit."""

import pytest

from moba_train.config.mesh import mesh_sizes
from moba_train.errors import ConfigError
from tests.resolve.refusals import assert_refused, problems
from tests.resolved import check, stages_of
from tests.small_recipe import Load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
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
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_its_key(load: Load, overrides: list[str], problem: str) -> None:
    assert_refused(load(*overrides), problem)


@pytest.mark.parametrize(
    ("replicate", "shard", "world_size", "sizes"),
    [(1, -1, 8, (1, 8)), (2, -1, 8, (2, 4)), (-1, 2, 8, (4, 2)), (2, 3, 6, (2, 3)), (1, 1, 1, (1, 1))],
)
def test_minus_one_fills_the_world(
    load: Load, replicate: int, shard: int, world_size: int, sizes: tuple[int, int]
) -> None:
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
def test_a_layout_that_does_not_fit_says_what_would(
    load: Load, replicate: int, shard: int, world_size: int, parts: list[str]
) -> None:
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
def test_a_sharing_of_sequences_that_does_not_fit_is_refused(
    load: Load, overrides: list[str], world_size: int, problem: str
) -> None:
    assert_refused(load(*overrides), problem, world_size, ranks_per_node=8)


def test_stages_may_share_sequences_among_different_numbers_of_ranks(load: Load) -> None:
    config = load("stages.1.parallel={cp: 4, cp_transport: ring}", "parallel.dp_replicate=2")
    check(config, 16, ranks_per_node=8)
    short, long = (stage.parallel for stage in stages_of(config))
    assert mesh_sizes(short, 16) == (1, 2, 8, 1, 1)
    assert mesh_sizes(long, 16) == (1, 2, 2, 4, 1)
    assert mesh_sizes(short, 16).shards == mesh_sizes(long, 16).shards
    # What is read at the same time is divided by cp, so a batch for 8 ranks of 8K tokens now fits on 32.
    check(load("stages.1.parallel.cp=4"), 32, ranks_per_node=8)


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
        (["parallel.tp_overlap=true"], 2, "parallel.tp_overlap: given true with parallel.tp 1, cp 1 and"),
        (
            ["parallel.tp=2", "parallel.tp_overlap=true"],
            2,
            "parallel.tp_overlap: given true with parallel.tp 2, cp 1 and compile: false",
        ),
        (
            ["parallel={tp: 2, tp_overlap: true}", "compile=true", "stages.1.parallel.cp=2"],
            4,
            "parallel.tp_overlap: given true with parallel.tp 2, cp 2 and compile: true; it needs",
        ),
        (["parallel.tp=2"], 5, "parallel.tp: given 2, which does not divide the 5 ranks; allowed: 1, 5"),
        (
            ["parallel={tp: 2, fsdp_copy_engines: true}"],
            16,
            "parallel.fsdp_copy_engines: given true, but the 8 ranks that share the weights with tp 2 are on several",
        ),
        (
            ["parallel={dp_replicate: 4, dp_shard: 3, tp: 2, fsdp_copy_engines: true}", "batch_tokens=24K"],
            24,
            "parallel.fsdp_copy_engines: given true, but the 3 ranks that share the weights with tp 2 are on several",
        ),
        (
            ["precision={linear: fp8, fp8: {emulate: true}}", "parallel={dp_shard: 5}", "batch_tokens=10K"],
            5,
            "precision.linear: given 'fp8', whose weights 5 ranks share in parts of equal rows: ",
        ),
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
def test_a_sharing_of_layers_that_does_not_fit_is_refused(
    load: Load, overrides: list[str], world_size: int, problem: str
) -> None:
    assert_refused(load(*overrides), problem, world_size, ranks_per_node=8)


def test_a_model_trained_with_an_overlap_that_is_refused_now_is_evaluated(load: Load) -> None:
    config = load("parallel={tp: 2, cp: 2, tp_overlap: true}", "compile=true")
    assert_refused(config, "parallel.tp_overlap: given true with parallel.tp 2, cp 2", 4)
    check(config, 4, training=False)


def test_shared_layers_are_of_the_run_not_of_a_stage(load: Load) -> None:
    config = load("parallel={tp: 2, dp_replicate: 2}", "stages.1.parallel={cp: 4}")
    check(config, 16, ranks_per_node=8)
    assert [mesh_sizes(stage.parallel, 16) for stage in stages_of(config)] == [(1, 2, 4, 1, 2), (1, 2, 1, 4, 2)]
    with pytest.raises(ConfigError, match=r"stages\[1\]\.parallel\.tp: unknown key; .* at parallel\.tp"):
        load("parallel.tp=2", "stages.1.parallel.tp=1")


def test_the_batch_must_divide_over_the_ranks(load: Load) -> None:
    (found,) = [text for text in problems(load(), 16) if "long" in text]
    ending = "; nearest: 131072; or set stages[1].parallel.cp to 2"
    assert found.endswith(f"needs a multiple of seq_len 8192 x 16 data-parallel ranks = 131072{ending}")
    check(load("stages.1.parallel.cp=2"), 16)
