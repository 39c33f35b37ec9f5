"""Pipelines that cannot work are refused, with the key to change."""

import pytest

from moba_train.config.mesh import mesh_sizes
from moba_train.errors import ConfigError
from tests.resolved import check
from tests.small_recipe import Load

INTERLEAVED = "parallel.pp_schedule=interleaved_1f1b"
ZERO_BUBBLE = "parallel.pp_schedule=zero_bubble"


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["parallel.pp=2"], 2),
        (["parallel.pp=2", "parallel.tp=2"], 8),
        (["parallel.pp=4", "parallel.pp_layers=[1, 1, 1, 1]"], 4),
        (["parallel.pp=2", INTERLEAVED, "parallel.pp_layers=[1, 1, 1, 1]"], 2),
        (["parallel.pp=2", ZERO_BUBBLE, "parallel.cp=2"], 4),
        (["parallel.pp=1", "parallel.pp_layers=[7]", INTERLEAVED], 1),
    ],
)
def test_what_can_work_is_accepted(load: Load, overrides: list[str], world_size: int) -> None:
    check(load(*overrides), world_size)


@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        (["parallel.pp=3"], 8, ["parallel.pp: given 3", "does not divide the 8 ranks"]),
        (["parallel.pp=4", "parallel.tp=4"], 8, ["parallel.tp: given 4", "4 to a pipeline", "allowed: 1, 2"]),
        (["parallel.pp=8"], None, ["parallel.pp: given 8", "model.layers 4"]),
        (["parallel.pp=4", INTERLEAVED], None, ["parallel.pp: given 4 with 2 parts", "model.layers 4"]),
        (["parallel.pp=2", "parallel.pp_layers=[2, 1, 1]"], None, ["parallel.pp_layers", "3 parts", "pp = 2"]),
        (["parallel.pp=2", "parallel.pp_layers=[2, 3]"], None, ["parallel.pp_layers", "5 layers", "model.layers is 4"]),
        (["parallel.pp=2", INTERLEAVED, "parallel.pp_layers=[2, 2]"], None, ["2 parts", "2 x pp = 4"]),
        (["parallel.pp=2", "parallel.pp_layers=[0, 4]"], None, ["parallel.pp_layers", "0"]),
        (["parallel.pp=2", ZERO_BUBBLE, "compile=true"], None, ["parallel.pp_schedule", "compile: true", "1f1b"]),
        (["parallel.pp=2", ZERO_BUBBLE, "activation_checkpointing=full"], None, ["activation_checkpointing: full"]),
        (["parallel.pp=2", ZERO_BUBBLE, "activation_checkpointing=selective"], None, ["activation_checkpointing: sel"]),
        (["parallel.pp=2", ZERO_BUBBLE, "memory.gpu_gib=8"], None, ["budget with memory.gpu_gib"]),
        (["parallel.pp=2", "activation_offload=true"], None, ["activation_offload", "parallel.pp 2", "false"]),
        (["parallel.pp=4", "batch_tokens=16K"], 4, ["batch_tokens", "2 micro-batches", "'long'", "at least 4: 32768"]),
        (["parallel.pp=2", INTERLEAVED, "batch_tokens=56K"], 2, ["7 micro-batches", "multiple of 3", "49152 or 65536"]),
    ],
)
def test_what_cannot_work_is_refused(
    load: Load, overrides: list[str], world_size: int | None, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(load(*overrides), world_size)
    text = "\n".join(caught.value.problems)
    assert all(word in text for word in words), text


def test_pipelines_are_the_outermost_dimension(load: Load) -> None:
    config = load("parallel.pp=2", "parallel.tp=2", "parallel.cp=2")
    assert mesh_sizes(config.parallel, 16) == (2, 1, 2, 2, 2)
