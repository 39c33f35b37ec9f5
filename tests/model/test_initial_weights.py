"""Initial weights: a pure function of the seed and a parameter's name."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moba_train.config.model import ModelConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer

SHAPE = {"vocab_size": 401, "hidden_size": 64, "intermediate_size": 150, "layers": 2, "heads": 4, "kv_heads": 2}


def initialized(seed: int = 0, **changes: Any) -> dict[str, torch.Tensor]:
    model = Transformer(ModelConfig(**{**SHAPE, **changes}))
    initialize_weights(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before() -> None:
    first = initialized()
    torch.manual_seed(123)
    torch.randn(77)
    state = torch.get_rng_state()
    model = Transformer(ModelConfig(**SHAPE))
    torch.set_rng_state(state)
    initialize_weights(model, 0)
    assert torch.equal(torch.get_rng_state(), state)  # nor does it disturb anyone else's random numbers
    assert all(torch.equal(first[name], parameter) for name, parameter in model.named_parameters())


def test_another_seed_gives_other_weights() -> None:
    first, second = initialized(0), initialized(1)
    assert not any(torch.equal(first[name], second[name]) for name in first if first[name].dim() == 2)


def test_no_two_matrices_are_alike() -> None:
    matrices = [w.flatten()[:100] for w in initialized().values() if w.dim() == 2]
    assert len({tuple((w / w.norm()).tolist()) for w in matrices}) == len(matrices)


def test_a_parameter_does_not_depend_on_which_others_exist() -> None:
    """Biases, norms and an output matrix may come and go; a pipeline stage holds only some of the blocks."""
    small, large = initialized(tie_embeddings=True), initialized(qkv_bias=True, qk_norm=True)
    assert all(torch.equal(small[name], large[name]) for name in small)


def test_a_rank_holds_its_shard_of_the_one_model() -> None:
    """Rank 2 of 3, without processes: `initialize_weights` needs no communication, so a fake group will do.

    The last rank, because 401 rows do not divide by 3; one rank only, because DTensor caches local shapes per process.
    """
    full = initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        model = Transformer(ModelConfig(**SHAPE))

        def shard(_name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
            for key, parameter in list(module.named_parameters(recurse=False)):
                cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(key, torch.nn.Parameter(cut))

        distribute_module(model, mesh, shard)
        initialize_weights(model, 0)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), full[name].chunk(3)[2]), name
    finally:
        dist.destroy_process_group()


def test_norms_are_one_biases_zero_and_matrices_have_the_stated_spread() -> None:
    """GPT-2: what writes to the residual stream is scaled down by sqrt(2 * layers)."""
    for name, weight in initialized(qkv_bias=True, qk_norm=True, init_std=0.05, layers=8).items():
        if name.endswith(".bias"):
            assert torch.equal(weight, torch.zeros_like(weight)), name
        elif weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.05 / math.sqrt(16) if residual else 0.05
            assert weight.std().item() == pytest.approx(std, rel=0.06), name
            assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel()), name
