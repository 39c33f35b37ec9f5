"""Weights and optimizer state of each rank, against those of the model that it builds."""

import pytest
import torch

from moba_train.config.mesh import MeshSizes, mesh_sizes
from moba_train.model.part import cut_to_part
from moba_train.model.spec import kind_parameters
from moba_train.model.transformer import Transformer
from moba_train.optim.registry import OPTIMIZERS
from moba_train.optim.spec import block_matrices
from moba_train.parallel import fsdp
from moba_train.parallel.activations import Kept, LayerActivations
from tests.resolved import estimate_of, spec_of, stages_of, weights_of, work_of
from tests.small_recipe import Load

MIXED = "attention={default: full, overrides: {0: {kind: moba, key_conv: 3}, 2: {kind: moba, key_conv: 5}}}"
"""Layers to which attention adds different numbers of parameters."""

layouts = pytest.mark.parametrize(
    "changes",
    [[], ["model.tie_embeddings=true"], ["parallel.pp_schedule=interleaved_1f1b"], ["parallel.pp_layers=[1, 3]"]],
    ids=["", "tied", "interleaved", "uneven"],
)


@layouts
def test_a_rank_of_a_pipeline_has_the_parameters_of_its_own_layers(load: Load, changes: list[str]) -> None:
    assert_parameters_of_own_layers(load, MIXED, changes)


def assert_parameters_of_own_layers(load: Load, attention: str, changes: list[str]) -> None:
    """Each rank of a pipeline of two has what its part of the model has, with this override for the attention."""
    kind = [*OPTIMIZERS][-1]  # muon, which has less state for matrices; the core alone has adamw
    config = load("parallel.pp=2", f"optim.kind={kind}", attention, "stages.1.attention=null", *changes)
    stage = stages_of(config)[0]
    sizes = mesh_sizes(stage.parallel, 2)
    for rank in range(2):
        work = work_of(config, stage, sizes, rank)
        with torch.device("meta"):
            part = Transformer(config.model, kind_parameters(config.model, spec_of(config).kinds))
        cut_to_part(part, work.part)
        found = weights_of(config, sizes, work)
        assert found.total == found.shard == sum(parameter.numel() for parameter in part.parameters())
        assert found.blocks == {
            int(name): sum(parameter.numel() for parameter in block.parameters())
            for name, block in part.blocks.named_children()
        }
        matrices = sum(matrix.numel() for matrix in block_matrices(part).values())
        assert found.optimizer == OPTIMIZERS[kind].state_bytes(matrices, found.total - matrices)


def test_gathered_weights_that_stay_are_those_of_their_own_layers(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "ONE_UNIT_PARAMETERS", 0)
    assert_gathered_weights_of_own_layers(load, MIXED)


def assert_gathered_weights_of_own_layers(load: Load, attention: str) -> None:
    """Weights that the layers keep gathered count as what these layers have, with this override for the attention."""
    config = load(attention, "stages.1.attention=null", "model.vocab_size=64")
    stage = stages_of(config)[0]
    estimate = estimate_of(config, stage, MeshSizes())

    def unsharded(*kept: int) -> int:
        return estimate.peak([LayerActivations(Kept.ALL, weights=layer in kept) for layer in range(4)]).unsharded

    blocks = weights_of(config, MeshSizes(), work_of(config, stage, MeshSizes())).blocks
    assert unsharded(0, 1, 2) - unsharded(1, 2, 3) == 2 * (blocks[0] - blocks[3]) > 0
