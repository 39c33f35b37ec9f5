"""The memory that a plan counts for layers of mechanisms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moba_train.attention.kind import MicroBatch
from moba_train.attention.registry import KINDS
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.memory.layer_memory import BlockBytes, LayerMemory, block_bytes
from moba_train.parallel import fsdp
from moba_train.parallel.activations import Kept
from moba_train.parallel.context.costs import gather_cost
from moba_train.parallel.context.policy import predict_cost
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_costs
from tests.mechanisms.experts_model import ACTIVE, HIDDEN, LivingRows, drawn, mixture, options
from tests.memory.test_memory import config
from tests.memory.test_weights import assert_gathered_weights_of_own_layers, assert_parameters_of_own_layers, layouts
from tests.parallel.test_stage_strategy import MOBA, stage_of
from tests.resolved import estimate_of, plan_of, setup_of, stages_of

TOKENS = 512


def test_layers_without_a_transport_count_what_they_gather() -> None:
    """Two ranks of 32K tokens: `msa` keeps the other rank's keys, values and index keys, `lightning` exchanges states
    alone."""

    plans = {}
    for kind in ("full", "msa", "lightning"):
        for cp in (1, 2):
            changes = {"batch_tokens": "64K", "parallel": {"cp": cp}, "activation_checkpointing": "none"}
            plans[kind, cp] = plan_of(config("llama-1b", "64K", {"default": kind}, **changes), cp)
    found = {key: plan.stages[0] for key, plan in plans.items()}
    row = 2 * 2 * 8 * 64  # bf16 keys and values of a token
    index = 2 * 64
    model = config("llama-1b", "64K", {}, batch_tokens="64K").model
    costs = {}
    for kind in ("full", "msa", "lightning"):
        stage, layout = found[kind, 2].stage, found[kind, 2].layout
        assert layout.strategy is not None
        (costs[kind],) = stage_costs(model, stage, layout.strategy).values()
    assert costs["full"].memory_bytes > 0
    assert costs["msa"].memory_bytes == 65536 * (row + index)
    assert costs["lightning"].memory_bytes == 0
    assert plans["lightning", 2].steps[0].time.cp == 0 < plans["full", 2].steps[0].time.cp
    assert plans["lightning", 2].steps[0].traffic["cp"].node == 0
    stage, config_of_run = found["msa", 2].stage, config("llama-1b", "64K", {"default": "msa"}, batch_tokens="64K")
    kept = estimate_of(config_of_run, stage, found["msa", 2].mesh).kept_bytes
    alone = estimate_of(config_of_run, stage, found["msa", 1].mesh).kept_bytes
    assert kept(0, Kept.ALL) - alone(0, Kept.ALL) // 2 == 32768 * (row + index)
    assert kept(0, Kept.ATTENTION) == alone(0, Kept.ATTENTION) // 2


def test_layers_that_gather_by_their_shard_cost_what_they_gather() -> None:
    """Keys and values of this rank's heads, all tokens; the others pay for the transport."""
    model, stage = stage_of({**MOBA, "overrides": {1: {"kind": "seer"}}}, tp=2, cp=2)
    strategy = CPStrategy(2, "allgather", "zigzag", 2)
    moba, seer = (stage_costs(model, stage, strategy)[layer] for layer in stage.attention)
    assert moba == predict_cost(strategy, stage_attention_shape(model, stage))
    assert seer == gather_cost(strategy, 2 * 8192, 2 * 4 * 32 * 2)


def test_partial_results_of_one_layer_that_cannot_be_merged_hold_for_all() -> None:
    attention = {**MOBA, "overrides": {1: {"kind": "moba_v1"}}}
    assert not stage_attention_shape(*stage_of(attention, cp=2)).facts.merges


def moe_block(compiled: bool) -> tuple[MixtureOfExperts, ModelConfig, BlockBytes]:
    layer = mixture(options(), torch.bfloat16)
    shape = {"vocab_size": 2, "hidden_size": HIDDEN, "intermediate_size": 1, "layers": 1, "heads": 1, "kv_heads": 1}
    model = ModelConfig.model_validate(shape | {"moe": layer.options.model_dump()})
    return layer, model, block_bytes(model, 2, 1, compiled, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_experts_keep_what_is_counted(compiled: bool) -> None:
    """Keeps the rows of copies of tokens that go into the experts, and not those that come out."""
    layer, _, block = moe_block(compiled)
    x = drawn(TOKENS, HIDDEN).bfloat16().requires_grad_()
    kept: dict[int, Tensor] = {}

    def noted(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16 and len(tensor) == TOKENS * ACTIVE:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    torch.compiler.reset()
    run = torch.compile(layer, backend="aot_eager_decomp_partition") if compiled else layer
    with saved_tensors_hooks(noted, lambda tensor: tensor):
        run(x)
    ends = 2 * 2 * HIDDEN  # the inputs of the norm and of the layer
    assert sum(tensor.nbytes for tensor in kept.values()) == TOKENS * (block.feed_forward - ends)


def test_gradients_of_experts_take_what_is_counted() -> None:
    """Two more such tensors; on several ranks four (test_exchange.py)."""
    layer, model, block = moe_block(compiled=False)
    with LivingRows(TOKENS) as living:
        layer(drawn(TOKENS, HIDDEN).bfloat16().requires_grad_())[0].sum().backward()
    recipe = config("llama-1b", "4K", {"default": "full"}, batch_tokens="4K")
    (stage,) = stages_of(recipe)
    memory = LayerMemory(model, setup_of(recipe).computation, stage, MeshSizes())
    gradients = memory.feed_forward_gradients(Kept.ALL, 0) / memory.tokens - block.feed_forward_gradients
    assert living.most == TOKENS * (ACTIVE + gradients / (2 * HIDDEN))


def test_layers_of_a_tp_group_are_not_divided_into_parts_before_their_heads_fill_one() -> None:
    """Each of two ranks has half of the 1,024 channels of `kda`, and so parts of 32K rows instead of 16K."""
    sizes = {"vocab_size": 2, "hidden_size": 64, "intermediate_size": 1, "layers": 1}
    model = ModelConfig.model_validate(sizes | {"heads": 16, "kv_heads": 16, "head_dim": 64})
    kind = KINDS["kda"](KINDS["kda"].Options(), 64)
    batch = MicroBatch(2, 24576, 24576, 1)
    assert kind.token_bytes(model, batch).activations == 0
    assert kind.token_bytes(model, batch._replace(tp=2)).activations > 0


MIXED = "attention={default: full, overrides: {0: {kind: moba_v05}, 1: {kind: nsa}, 2: {kind: kda}}}"
"""Kinds that add different numbers of parameters to a layer."""


@layouts
def test_a_rank_of_a_pipeline_has_the_parameters_of_its_own_layers(
    load: Callable[..., RunConfig], changes: list[str]
) -> None:
    assert_parameters_of_own_layers(load, MIXED, changes)


def test_gathered_weights_that_stay_are_those_of_their_own_layers(
    load: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", 0)
    assert_gathered_weights_of_own_layers(load, MIXED)
