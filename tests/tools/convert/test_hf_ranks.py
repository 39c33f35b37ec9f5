"""Ranks read their parts of a Hugging Face model: columns and rows with tensor parallelism, their own experts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moba_train.config.mesh import MeshSizes
from moba_train.model.transformer import Transformer
from moba_train.parallel.dims import ParallelDims
from moba_train.parallel.world import joined_world
from moba_train.tools.hf.family import family_of
from moba_train.tools.hf.weights import fused_tensors, load_hf_weights, places
from tests.resolved import sharded_of
from tests.run.test_tensor_parallel import gathered, recipe
from tests.run.trainer_ranks import Ranks
from tests.tools.convert.hf_models import sized

MIXTURE = {"moe": {"experts": 4, "active": 2, "intermediate_size": 28, "router": {"balance": "bias"}}}
GPT_OSS = {"qkv_bias": True, "o_bias": True, "moe": MIXTURE["moe"] | {"bias": True}}
CASES: dict[str, tuple[str, dict[str, Any], MeshSizes, int]] = {
    "qwen2, tp 2": ("qwen2", {"qkv_bias": True}, MeshSizes(tp=2), 1),
    "mixtral, tp 2": ("mixtral", MIXTURE, MeshSizes(tp=2), 1),
    "gpt_oss, ep 2": ("gpt_oss", GPT_OSS, MeshSizes(dp_shard=2), 2),
    "mixtral, ep 2": ("mixtral", MIXTURE, MeshSizes(dp_shard=2), 2),
}
"""Family, keys of `model`, layout, and ranks that divide the experts."""


def load_and_collect(folder: str, output: str, name: str) -> None:
    """The weights that two ranks read from a Hugging Face folder."""
    _, options, sizes, ep = CASES[name]
    with joined_world() as world:
        model = sharded_of(recipe(**options), ParallelDims(sizes, world, ep))
        load_hf_weights(model, Path(folder))
        weights = {name: gathered(parameter) for name, parameter in model.named_parameters()}
        if world.is_main:
            torch.save(weights, output)


@pytest.mark.parametrize("name", CASES)
def test_each_rank_reads_its_part_of_a_hugging_face_model(ranks: Ranks, tmp_path: Path, name: str) -> None:
    model_type, options, *_ = CASES[name]
    model = Transformer(recipe(**options).model)
    want = {key: torch.randn(parameter.shape) for key, parameter in model.named_parameters()}
    shapes = {key: tuple(tensor.shape) for key, tensor in want.items()}
    theirs = fused_tensors(places({"intermediate_size": 28}, family_of(model_type), shapes), shapes, want.__getitem__)
    save_file({name: tensor.contiguous() for name, tensor in theirs}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(sized(model_type) | {"intermediate_size": 28}))
    ranks.work(load_and_collect, (str(tmp_path), str(tmp_path / "weights.pt"), name), 2)
    got = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key
