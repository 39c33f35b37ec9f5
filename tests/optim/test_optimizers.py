"""What every registered optimizer promises: parameter groups, the state it keeps, and what it leaves alone."""

import pytest
import torch
from torch import nn

from moba_train.config.optim import OptimConfig
from moba_train.optim.registry import OPTIMIZERS, build_optimizer, set_learning_rate
from tests.conftest import LEFT_OUT

KINDS = ["adamw", *([] if "mechanisms" in LEFT_OUT else ["muon"])]
CPU = torch.device("cpu")


class Model(nn.Module):
    """A block with a matrix, a bias and a norm, and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        self.output = nn.Linear(5, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.blocks(x))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_every_optimizer_that_a_recipe_can_name_is_registered_and_tested() -> None:
    assert list(OPTIMIZERS) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_in_one_group_and_groups_follow_the_rate_by_their_factor(
    kind: str, model: nn.Module
) -> None:
    optimizer = build_optimizer(model, OptimConfig(kind=kind), CPU)
    found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, found)) == sorted(map(id, model.parameters()))
    optimizer.param_groups[0]["lr_factor"] = 0.25
    set_learning_rate(optimizer, 0.5)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.125, *(0.5 * group["lr_factor"] for group in optimizer.param_groups[1:])]


def test_parameters_whose_names_match_have_a_rate_of_their_own(model: nn.Module) -> None:
    """Decayed or not as others are; the first pattern that matches counts."""
    factors = {"*.bias": 3.0, "blocks.*": 0.5, "*": 1.0}
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1, lr_factors=factors), CPU)
    set_learning_rate(optimizer, 0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(one)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for one in group["params"]
    }
    assert found == {
        "blocks.0.weight": (0.25, 0.1),
        "blocks.0.bias": (1.5, 0.0),
        "blocks.1.weight": (0.25, 0.0),
        "blocks.1.bias": (1.5, 0.0),
        "output.weight": (0.5, 0.1),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_its_state_is_what_it_says_by_name_and_size(kind: str, model: nn.Module) -> None:
    spec = OPTIMIZERS[kind]
    optimizer = build_optimizer(model, OptimConfig(kind=kind), CPU)
    step(model, optimizer)
    moments = 0
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        expected = spec.matrix_state if name == "blocks.0.weight" else spec.state
        assert state.keys() == expected.keys()
        for key, bytes_each in expected.items():
            size = state[key].numel() * state[key].element_size()
            assert size == (bytes_each * parameter.numel() if bytes_each else state[key].element_size()), key
            moments += size if bytes_each else 0
    assert spec.state_bytes(matrices=30, others=5 + 10 + 20) == moments


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_is_left_alone_with_its_state(kind: str, model: nn.Module) -> None:
    optimizer = build_optimizer(model, OptimConfig(kind=kind, weight_decay=0.5), CPU)
    step(model, optimizer)
    frozen = model.get_parameter("blocks.0.weight")
    frozen.requires_grad_(False)
    before = [frozen.detach().clone(), *(value.clone() for value in optimizer.state[frozen].values())]
    moving = model.get_parameter("output.weight").detach().clone()
    step(model, optimizer)
    after = [frozen.detach(), *optimizer.state[frozen].values()]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert not torch.equal(moving, model.get_parameter("output.weight"))


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_decay_and_nothing_else(kind: str, model: nn.Module) -> None:
    optimizer = build_optimizer(model, OptimConfig(kind=kind, weight_decay=0.5), CPU)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.5 if parameter.dim() == 2 else 0.0)
