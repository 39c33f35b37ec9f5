"""Ranks of tensor parallelism read their parts of a Hugging Face model."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from moba_train.config.mesh import MeshSizes
from moba_train.model.transformer import Transformer
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import joined_world
from moba_train.tools.hf.family import Qwen2
from moba_train.tools.hf.weights import load_hf_weights
from tests.resolved import sharded_of
from tests.run.test_tensor_parallel import gathered, recipe
from tests.run.trainer_ranks import Ranks


def load_and_collect(folder: str, output: str) -> None:
    """The weights that two ranks read from a Hugging Face folder."""
    with joined_world() as world:
        model = sharded_of(recipe(qkv_bias=True), ParallelDims(MeshSizes(tp=2), world))
        load_hf_weights(model, Path(folder))
        weights = {name: gathered(parameter) for name, parameter in model.named_parameters()}
        if world.is_main:
            torch.save(weights, output)


def test_each_rank_reads_its_part_of_a_hugging_face_model(ranks: Ranks, tmp_path: Path) -> None:
    want = {
        name: torch.randn(parameter.shape)
        for name, parameter in Transformer(recipe(qkv_bias=True).model).named_parameters()
    }
    save_file({Qwen2().name(name): tensor for name, tensor in want.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    ranks.work(load_and_collect, (str(tmp_path), str(tmp_path / "weights.pt")), 2)
    got = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
