"""Recipes whose mechanisms cannot work on their layout, model or device are refused with the key to change."""

import pytest
import torch
from torch.torch_version import TorchVersion

from moba_train.config.mesh import MeshSizes
from moba_train.errors import ConfigError
from moba_train.memory.devices import H200
from moba_train.memory.flops import matmul_flops
from tests.resolve.refusals import assert_refused, problems
from tests.resolve.test_recipe_warnings import VALIDATION, recipe_warnings
from tests.resolved import check, spec_of, stages_of, weights_of, work_of
from tests.small_recipe import Load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=[2,3]"],
            "stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', which sends queries to the owners of "
            "the blocks that they select; kind 'full' (layers 2-3) cannot be divided so",
        ),
    ],
)
def test_a_layout_that_dispatch_cannot_use_is_refused_with_its_key(
    load: Load, overrides: list[str], problem: str
) -> None:
    assert_refused(load(*overrides), problem)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("infllm_v2={topk: 160, local_blocks: 64}", "triton"),  # which reads the local blocks as one span
        ("infllm_v2={topk: 160, local_blocks: 32}", "reference"),
        ("infllm={topk: 126}", "triton"),
        ("infllm={topk: 126, first_blocks: 2}", "reference"),
        ("moba_v1={merge: softmax, block_size: 64}", "triton"),
        ("moba_v1={block_size: 64}", None),  # sums over blocks have kernels of their own
        ("moba_v05={block_size: 64}", None),
    ],
)
def test_a_plan_names_the_kernels_of_as_many_blocks_as_they_are_given(
    load: Load, kind: str, backend: str | None
) -> None:
    name = kind.partition("=")[0]
    stage = f"stages.1.attention={{default: {name}, full_layers: none, overrides: {{}}}}"
    layout = check(load("model.head_dim=64", stage, f"attention.{kind}"), 1, gpu=H200, training=False).layouts[1]
    found = {layer.kind: choice.order[0] for layer, choice in layout.backends.items()}
    assert found.get(name) == backend


def test_the_reach_of_gradients_is_not_measured_in_a_pipeline(load: Load) -> None:
    with pytest.raises(ConfigError, match="gradient_reach"):
        check(load("parallel.pp=2", "evaluation.gradient_reach={}", "data.validation=[{path: v}]"))


def test_an_implementation_that_cannot_run_where_the_run_trains_is_refused(load: Load) -> None:
    config = load("optim.implementation=apex")
    check(config)  # the device is not known
    check(config, device="cpu", training=False)
    assert problems(config, device="cpu") == [
        "optim.implementation: given 'apex', which cannot run: the run trains on cpu, a GPU needed; set torch"
    ]


def test_an_implementation_of_adamw_is_refused_for_muon(load: Load) -> None:
    problem = "optim.implementation: given 'deepspeed_cpu', which is for optim.kind: adamw alone, with kind: muon"
    assert_refused(load("optim.kind=muon", "optim.implementation=deepspeed_cpu"), problem)


def test_rates_of_single_parameters_are_refused_for_muon(load: Load) -> None:
    problem = "optim.lr_factors: given {'norm.weight': 2.0} with kind muon; allowed: with kind adamw"
    assert_refused(load("optim.kind=muon", "optim.lr_factors={norm.weight: 2}"), problem)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("precision.compute=fp32", "which computes in 16 bits on CUDA; set precision.compute: bf16"),
        ("model.head_dim=12", "which needs heads of a width of 8, 16, ... or 256 on CUDA; the model's have 12"),
    ],
)
def test_dispatch_is_refused_where_no_kernel_could_attend_on_cuda(load: Load, override: str, text: str) -> None:
    config = load("stages.1.parallel={cp: 2, cp_transport: dispatch}", "stages.1.attention.full_layers=none", override)
    (found,) = problems(config, device="cuda")
    assert found.startswith(f"stages[1].parallel.cp_transport: given 'dispatch' in stage 'long', {text}")
    check(config, device="cpu")


@pytest.mark.parametrize(
    ("options", "layers", "refused"),
    [
        ("", "{}", True),
        ("mode: warmup, ", "{}", False),
        ("train_gate: true, ", "{}", False),
        ("", "{0: {train_gate: true}}", False),
    ],
)
def test_gates_that_do_not_learn_cannot_be_all_that_is_trained(
    load: Load, options: str, layers: str, refused: bool
) -> None:
    config = load(
        f"stages.1.attention={{default: seer, overrides: {layers}, seer: {{{options}block_size: 16, topk: 2}}}}",
        "stages.1.trainable=['blocks.*.attention.seer.*']",
    )
    if not refused:
        check(config)
        return
    with pytest.raises(ConfigError, match=r"stages\[1\]\.trainable: .*those of seer do not learn .*train_gate: true"):
        check(config)


def test_a_checkpoint_of_a_pipeline_is_evaluated_without_one(load: Load) -> None:
    """Problems of training alone do not keep a checkpoint from being evaluated."""
    config = load("parallel.pp=2", "evaluation.gradient_reach={}", "data.validation=[{path: v}]")
    check(config, allow_idle=True, training=False)


def test_nothing_is_said_of_the_loss_masks_of_corpora_that_need_not_exist_yet(load: Load) -> None:
    """`plan --no-data`; `gradient_reach` tells of loss masks that exist."""
    assert recipe_warnings(load(VALIDATION, "evaluation.position_wise.bucket=1K", "evaluation.gradient_reach={}")) == []


MOE = "model.moe={experts: 8, active: 2, intermediate_size: 24}"


@pytest.mark.parametrize(
    ("overrides", "ranks", "problem"),
    [
        (
            [MOE, "parallel.ep=3"],
            6,
            "parallel.ep: given 3, which does not divide model.moe.experts 8; allowed: 1, 2, 4",
        ),
        ([MOE, "parallel.ep=4"], 2, "parallel.ep: given 4, which does not divide the 2 ranks of dp_shard x cp"),
        (["parallel.ep=2"], 2, "parallel.ep: given 2, but the model has no experts; set 1, or give model.moe"),
        (
            [MOE, "model.moe.layers=none", "parallel.ep=2"],
            2,
            "parallel.ep: given 2, but the model has no experts; set 1, or give model.moe",
        ),
        ([MOE, "model.activation=gelu_tanh"], 1, "model.activation: given 'gelu_tanh', but all layers have experts"),
        (
            [MOE, "parallel={tp: 2}", "model.moe.intermediate_size=15"],
            2,
            "parallel.tp: given 2, which does not divide model.moe",
        ),
        ([MOE, "parallel={tp: 2}", "optim.kind=muon"], 2, "optim.kind: given 'muon' with experts and parallel.tp: 2"),
        (
            [MOE, "parallel={ep: 2, fsdp_copy_engines: true}"],
            2,
            "parallel.fsdp_copy_engines: given true with parallel.ep",
        ),
        ([MOE, "compile=true", "precision.compute=fp32"], 1, "compile: given true with experts in float32"),
        (
            [MOE, "model.moe.intermediate_size=20", "precision.compute=bf16"],
            1,
            "model.moe.intermediate_size: given 20 (by parallel.tp 1) with model.hidden_size 128; allowed: multiples",
        ),
    ],
)
def test_experts_that_cannot_be_are_refused_with_their_key(
    load: Load, overrides: list[str], ranks: int, problem: str
) -> None:
    assert_refused(load(*overrides), problem, ranks)


def test_a_torch_that_cannot_take_experts_backward_passes_apart_is_named(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(MOE, "parallel={pp: 2, pp_schedule: zero_bubble}")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    check(recipe)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert_refused(recipe, "parallel.pp_schedule: given 'zero_bubble' with experts, whose backward passes torch 2.11.0")


def test_the_plan_counts_the_experts_that_a_token_passes_through(load: Load) -> None:
    """8 of 32 active experts of the dense width's eighth: the operations of the dense model and of the router, and four
    times its weights, of which expert parallelism gathers a part."""
    dense = load()
    model = "model.moe={experts: 32, active: 8, intermediate_size: 48}"
    experts = load(model)
    assert matmul_flops(experts.model) - matmul_flops(dense.model) == 4 * 6 * 128 * 32
    counts = spec_of(experts).counts
    assert counts.active == spec_of(dense).counts.total + 4 * 128 * 32
    assert counts.total == counts.active + 3 * spec_of(dense).counts.feed_forward
    divided = load(model, "parallel.ep=4")
    sizes = MeshSizes(dp_shard=4)
    whole, part = (
        weights_of(config, sizes, work_of(config, stages_of(config)[0], sizes)) for config in (experts, divided)
    )
    assert part.shard == whole.shard
    assert whole.blocks[0] - part.blocks[0] == 3 * 32 * 3 * 128 * 48 // 4


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [
                "stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}",
                "stages.1.attention={default: moba_v1}",
            ],
            "stages[1].until.trailing_loss_recovered.reference: given 'full', but layers of moba_v1 have no full atten",
        ),
        (
            [
                "stages.1.until={trailing_loss_recovered: {tolerance: 0.1}, max_tokens: 9M}",
                "stages.1.attention={default: lightning}",
                "attention.overrides={}",
            ],
            "stages[1].until.trailing_loss_recovered.reference: given 'full', but full attention would change no ",
        ),
    ],
)
def test_criteria_against_full_attention_need_a_kind_that_has_another_one(
    load: Load, overrides: list[str], problem: str
) -> None:
    assert_refused(load(*overrides), problem)
