"""The context-parallel strategy that follows from a recipe: what one rank of a tensor-parallel group attends with."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moba_train.attention.protocol import AttentionFacts
from moba_train.config.mesh import MeshSizes
from moba_train.config.model import ModelConfig
from moba_train.config.schema import RunConfig
from moba_train.config.stages import Stage
from moba_train.memory.devices import Device, Gpu, weakest
from moba_train.parallel import data_shard
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.data_shard import ContextEngines
from moba_train.parallel.dims import StageDims
from moba_train.parallel.stage_strategy import stage_attention_shape, stage_strategy
from moba_train.parallel.world import World
from tests.resolved import stages_of


def stage_of(attention: dict[str, Any], **parallel: Any) -> tuple[ModelConfig, Stage]:
    """Two sequences of 8K tokens in a micro-batch, two layers with 16 query heads on 8 key/value heads."""
    config = RunConfig.model_validate(
        {
            "name": "test",
            "run_dir": "unused",
            "model": {
                "vocab_size": 64,
                "hidden_size": 512,
                "intermediate_size": 64,
                "layers": 2,
                "heads": 16,
                "kv_heads": 8,
            },
            "attention": attention,
            "data": {"train": [{"path": "unused"}]},
            "batch_tokens": "64K",
            "micro_batch_size": 2,
            "stages": [{"name": "only", "seq_len": "8K", "tokens": "1M"}],
            "parallel": parallel,
        }
    )
    (stage,) = stages_of(config)
    return config.model, stage


MOBA = {"default": "moba", "moba": {"block_size": 256, "topk": 4}}


def test_a_rank_has_its_part_of_the_heads_and_all_tokens_of_a_micro_batch() -> None:
    shape = stage_attention_shape(*stage_of(MOBA, tp=2, cp=2), element_bytes=4)
    sizes = (shape.tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.element_bytes)
    assert sizes == (2 * 8192, 8, 4, 32, 4)


def test_what_one_layer_needs_holds_for_all() -> None:
    """Facts of all layers together, and each layer's attention once."""
    grouped = {**MOBA, "overrides": {0: {"select": "group", "topk": 6}}}
    shape = stage_attention_shape(*stage_of(grouped, cp=2))
    assert shape.facts == AttentionFacts(couples_heads=True, work_grows=False)
    assert len(shape.attentions) == 2
    shape = stage_attention_shape(*stage_of({**MOBA, "full_layers": "last:1"}, cp=2))
    assert shape.facts == AttentionFacts()


@pytest.mark.parametrize(
    ("tp", "cp", "ranks_per_node", "node_size"), [(1, 4, 8, 4), (1, 8, 4, 4), (2, 4, 4, 2), (4, 4, 4, 1), (1, 4, 6, 2)]
)
def test_ranks_with_the_same_heads_share_a_node_as_far_as_it_has_room(
    tp: int, cp: int, ranks_per_node: int, node_size: int
) -> None:
    """The ranks of a tensor-parallel group are neighbours; those of a cp group lie tp ranks apart."""
    model, stage = stage_of(MOBA, tp=tp, cp=cp, cp_transport="allgather")
    strategy, _ = stage_strategy(model, stage, ranks_per_node)
    assert (strategy.ranks, strategy.node_size) == (cp, node_size)


@pytest.mark.parametrize(("kind", "layout"), [("full", "zigzag"), ("moba", "contiguous")])
def test_work_that_grows_in_any_layer_makes_shards_zigzag(kind: str, layout: str) -> None:
    attention = {**MOBA, "overrides": {1: {"kind": kind}}}
    strategy, _ = stage_strategy(*stage_of(attention, cp=4, cp_transport="hierarchical"), ranks_per_node=2)
    assert strategy.layout == layout


def test_the_weakest_of_all_ranks_decides() -> None:
    devices = [
        Device(Gpu("one", 989.0, 80e9, capability=(9, 0)), 8e9),
        Device(Gpu("other", 312.0, 40e9, capability=(8, 0)), 9e9),
    ]
    assert weakest(devices) == Device(Gpu("other", 312.0, 40e9, capability=(8, 0)), 8e9)
    assert weakest([Device(None, 8e9), Device(None, 7e9)]) == Device(None, 7e9)


def test_an_engine_is_made_once_for_all_stages_with_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = CPStrategy(2, "allgather", "zigzag", 2)
    monkeypatch.setattr(data_shard, "context_engine", lambda *_: object())
    world = World(0, 2, torch.device("cpu"), 2, timedelta(seconds=1), dist.HashStore())
    dims = SimpleNamespace(world=world, for_stage=lambda sizes: StageDims(sizes, 0, object()))  # type: ignore[arg-type]
    engines = ContextEngines(dims)  # type: ignore[arg-type]
    shards = [engines.data_shard(MeshSizes(cp=2), strategy) for _ in range(3)]
    assert len({id(shard.engine) for shard in shards}) == 1
    assert engines.data_shard(MeshSizes(dp_shard=2), None).engine is None
