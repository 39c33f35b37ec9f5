"""Plans of recipes: memory, time, tables."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from moba_train.config.base import format_duration
from moba_train.config.mesh import MeshSizes
from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from moba_train.memory.devices import peak_tflops
from moba_train.tools.plan.render import print_plan
from tests.resolved import plan_of

LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "layers": 32, "heads": 32}


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "demo",
            "run_dir": "runs/demo",
            "model": {**LLAMA_8B, "kv_heads": 8},
            "data": {"train": [{"path": "a"}]},
            "batch_tokens": "1M",
            "stages": [
                {"name": "short", "seq_len": "8K", "tokens": "1B", "attention": {"default": "full"}},
                {"name": "long", "seq_len": "128K", "tokens": "1B", "attention": {"full_layers": "last:3"}},
            ],
            **changes,
        }
    )


def test_a_plan_adds_up() -> None:
    plan = plan_of(config(parallel={"dp_replicate": 2}), ranks=8)
    short, long = plan.stages
    assert short.mesh == long.mesh == MeshSizes(dp_replicate=2, dp_shard=4)
    assert (short.layout.micro_batches, long.layout.micro_batches) == (16, 1)
    assert short.tokens == short.stage.steps * 2**20 >= 10**9
    assert short.real_flops == short.dense_flops
    assert long.real_flops < long.dense_flops
    assert plan.seconds == sum(step.stage.steps * step.time.seconds for step in plan.steps)


def test_context_parallelism_divides_activations_and_costs_communication() -> None:
    alone = plan_of(config(activation_checkpointing="full"), 16)
    cp_recipe = {"parallel": {"cp": 8}, "activation_checkpointing": "full"}
    inside = plan_of(config(**cp_recipe), 16)
    long = inside.stages[1]
    tables = io.StringIO()
    assert long.mesh == MeshSizes(dp_shard=2, cp=8)
    assert long.memory.parameters == alone.stages[1].memory.parameters
    assert long.layout.micro_batches == 4
    assert long.layout.strategy is not None
    assert long.layout.strategy.node_size == 8
    received = [step.traffic["cp"] for step in inside.steps]
    assert received[0].node > 0 == received[1].network
    assert inside.steps[1].time.cp > 0 == alone.steps[1].time.cp
    assert inside.steps[1].time.seconds > alone.steps[1].time.seconds

    across = plan_of(config(**cp_recipe), 16, ranks_per_node=4)
    strategy = across.stages[1].layout.strategy
    assert strategy is not None
    assert strategy.transport == "hierarchical"
    assert across.steps[1].traffic["cp"].network > 0
    print_plan(across, Console(file=tables, width=100))
    for part in ("dp_shard 2 x cp 8", "hierarchical", "400 Gbit/s", "auto takes", "cp's communication and copies"):
        assert part in tables.getvalue(), part


def test_tensor_parallelism_divides_weights_activations_and_logits_and_costs_communication() -> None:
    alone = plan_of(config(batch_tokens="2M"), 16).stages[0]
    plan = plan_of(config(batch_tokens="2M", parallel={"tp": 8, "dp_replicate": 2}), 16)
    tables = io.StringIO()
    sharded = plan.stages[0]
    assert sharded.mesh == MeshSizes(dp_replicate=2, tp=8)
    assert sharded.memory.parameters == pytest.approx(4 * 8_030_261_248 / 8)
    assert sharded.memory.moment == alone.memory.moment == "loss"
    # The gathered inputs of the projections, 2 x 4096 numbers a token, are on all ranks.
    gathered = 32 * 2 * 2 * 4096 * 8192
    assert sharded.memory.activations - gathered == pytest.approx((alone.memory.activations - gathered) / 8)
    row = 2 * 4096  # bf16: a token's input of the loss, or its gradient
    weight = 2 * 128256 * 4096
    assert alone.memory.working == 12 * 4096 * 128256 + 2 * 4096 * row + 8192 * row + weight
    assert sharded.memory.working == 2 * (1024 * row + weight)  # a single chunk, whose gradients are scaled
    # A micro-batch of 8192 rows: 8 transfers of 7/8 of 64 MiB in each of 32 layers, at 300 GB/s.
    # The output weight and its gradient, 7/8 of each, come on top.
    received = 7 / 8 * (32 * 8 * 2**26 + 2 * weight)
    assert plan.steps[0].time.tp == pytest.approx(sharded.layout.micro_batches * received / 300e9)
    print_plan(plan, Console(file=tables, width=100))
    for part in ("dp_shard 1 x tp 8", "tp's communication"):
        assert part in tables.getvalue(), part

    both = plan_of(config(parallel={"tp": 2, "cp": 8}), 16).stages[1].layout.strategy
    assert both is not None
    assert (both.ranks, both.node_size) == (8, 4), "a node's 8 GPUs hold 4 of a context group's 8 ranks"


def test_moba_layers_of_several_sizes_take_their_own_time() -> None:
    def attention_seconds(**options: Any) -> float:
        return plan_of(config(attention=options, parallel={"cp": 8}), 16).steps[1].time.attention

    mixed = attention_seconds(moba={"block_size": 512, "topk": 3}, overrides={0: {"topk": 12}})
    few, many = (attention_seconds(moba={"block_size": 512, "topk": topk}) for topk in (3, 12))
    assert mixed == pytest.approx(few + (many - few) / 29)  # layers with MoBA
    assert many > few


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": {"compute": "fp32"}}, "time is not predicted: precision.compute: given fp32, whose steps were"),
        ({"attention": {"default": "infllm"}}, "time of long is not predicted: attention kind 'infllm' has no"),
    ],
)
def test_what_cannot_be_predicted_is_said_and_all_else_is_printed(change: dict[str, Any], reason: str) -> None:
    text = io.StringIO()
    plan = plan_of(config(**change), 8)
    assert plan.seconds == math.inf
    print_plan(plan, Console(file=text, width=100))
    assert reason in text.getvalue()
    assert "dense causal" in text.getvalue()
    assert "all stages:" not in text.getvalue()
    assert ("time (estimate)" in text.getvalue()) == ("time of long" in reason) == bool(plan.steps)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="dp_replicate"):
        plan_of(config(parallel={"dp_replicate": 3}), ranks=8)


def test_the_tables_show_every_stage_and_part() -> None:
    text = io.StringIO()
    print_plan(plan_of(config(), 8), Console(file=text, width=100))
    for part in (
        "8,030,261,248",
        "short",
        "long",
        "29 moba, 3 full",
        "1,048,576",
        "dense causal",
        "real FLOPs count one document per sequence: corpora not found",
        "activations",
        "hours",
    ):
        assert part in text.getvalue(), part


def test_a_stage_with_until_is_planned_from_its_tokens_to_its_maximum() -> None:
    until = {"trailing_loss_recovered": {"tolerance": 0.01}, "max_tokens": "4B"}
    prolonged = {"name": "activate", "seq_len": "8K", "tokens": "1B", "until": until}
    plan = plan_of(config(stages=[prolonged]), 8)
    text = io.StringIO()
    assert plan.stages[0].tokens == pytest.approx(4e9, rel=1e-3)
    print_plan(plan, Console(file=text, width=100))
    for part in ("1B to 4B", "954 to 3,815", "at most"):
        assert part in text.getvalue(), part


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_rates_by_the_names_cuda_gives(name: str, rate: int | None) -> None:
    assert peak_tflops(name) == rate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0043, "0.004 seconds"), (5, "5.0 seconds"), (90, "1.5 minutes"), (7200, "2.0 hours"), (1e6, "11.6 days")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
