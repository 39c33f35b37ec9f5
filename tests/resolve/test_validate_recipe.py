"""Combinations that cannot work are refused before any GPU is touched, all of them at once."""

import pytest

from moba_train.config.load import dump_config, load_config
from moba_train.registry import ADAMW_KERNELS, TRANSPORTS
from tests.resolve.refusals import assert_refused, problems
from tests.resolved import check
from tests.small_recipe import Load, Write


def test_the_recipe_itself_is_valid_on_the_world_sizes_it_divides_into(load: Load) -> None:
    for world_size in (None, 1, 2, 4, 8):
        check(load(), world_size)


@pytest.mark.parametrize("transport", ["auto", *TRANSPORTS])
def test_what_a_valid_recipe_is_written_as_is_valid(load: Load, write: Write, transport: str) -> None:
    """A checkpoint holds it with every key, and evaluation begins there."""
    layers = ["stages.1.attention.full_layers=none"] if transport == "dispatch" else []
    config = load("parallel.cp=4", f"stages.1.parallel={{cp_transport: {transport}}}", *layers)
    check(config, 4, ranks_per_node=2)
    check(load_config(write("dumped.yaml", dump_config(config))), 4, ranks_per_node=2)


@pytest.mark.skipif("apex" not in ADAMW_KERNELS, reason="the core alone has torch's AdamW")
def test_an_implementation_that_cannot_run_where_the_run_trains_is_refused(load: Load) -> None:
    config = load("optim.implementation=apex")
    check(config)  # the device is not known
    check(config, device="cpu", training=False)
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
        (["stages.1.name=Infinity"], "stages[1].name: given 'Infinity', which logs write for a number"),
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
            ["memory.gpu_gib=80", "activation_checkpointing=full"],
            "memory.gpu_gib: given 80 with activation_checkpointing: full, which it does not change; allowed: null, "
            "or activation_checkpointing or parallel.reshard_after_forward: budget",
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
        (
            ["model.rope.overrides={every:2: {factor: 4}}"],
            "model.rope.overrides: layers 1, 3: factor: given 4, which kind 'none' does not use",
        ),
        (
            ["model.rope.overrides={0: {fraction: 0.01}}"],
            "model.rope.overrides: layer 0: fraction: given 0.01, with which 0 dimensions of a head of width",
        ),
        (["stages.1.rope.kind=abf"], "stages[1].rope.factor: given 4, which kind 'abf' does not use"),
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
        (["stages.1.rope.factor=1"], "stages[1].rope.factor: given 1, with which kind 'pi' changes nothing"),
        (
            ["stages.1.rope={kind: yarn, original_seq_len: 2K}"],
            "stages[1].rope.factor: given 1, with which kind 'yarn' changes nothing",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_its_key(load: Load, overrides: list[str], problem: str) -> None:
    assert_refused(load(*overrides), problem)


@pytest.mark.parametrize(
    "override",
    ["attention.overrides={3: {topk: 2}}", "stages.0.attention.overrides={0: {topk: 2}}", "stages.1.rope.factor=1"],
)
def test_a_recipe_that_was_trained_with_may_have_options_that_change_nothing(load: Load, override: str) -> None:
    """Earlier versions did not refuse them, and its checkpoints must stay usable."""
    assert problems(load(override))
    check(load(override), allow_idle=True)


def test_all_problems_come_at_once_and_only_once(load: Load) -> None:
    config = load("model.kv_heads=3", "attention.full_layers=lst:1", "parallel.dp_shard=0", "batch_tokens=1K")
    found = problems(config, 4)
    assert len(found) == len(set(found))
    keys = [text.split(":")[0] for text in found]
    # The stages inherit the recipe's attention, not its complaint; the long stage brings a full_layers of its own.
    assert keys == ["model.kv_heads", "attention.full_layers", "parallel.dp_shard", "batch_tokens", "batch_tokens"]
