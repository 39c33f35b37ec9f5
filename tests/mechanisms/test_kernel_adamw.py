"""AdamW by other packages' kernels: the same steps as torch's AdamW.

Where a package is absent, a kernel with its interface stands in for it and computes in float64; the package itself is
tested where it can be imported, on a GPU for apex and Transformer Engine.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from moba_train.config.optim import OptimConfig
from moba_train.errors import LaunchError
from moba_train.mechanisms import adamw as adamw_cpu
from moba_train.optim.adamw import IMPLEMENTATIONS, implementation_problem
from moba_train.optim.registry import build_optimizer, set_learning_rate
from tests.adam_stand_ins import StandInAdam, multi_tensor_adam

FUSED = ["apex", "transformer_engine"]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the place of the packages."""
    modules = {name: ModuleType(name) for name in ("amp_C", "transformer_engine", "transformer_engine.pytorch")}
    modules |= {name: ModuleType(name) for name in ("transformer_engine_torch", "deepspeed", "deepspeed.ops")}
    modules["deepspeed.ops.adam"] = ModuleType("deepspeed.ops.adam")
    for name in ("amp_C", "transformer_engine_torch"):
        modules[name].multi_tensor_adam = multi_tensor_adam  # type: ignore[attr-defined]
    modules["deepspeed.ops.adam"].DeepSpeedCPUAdam = StandInAdam  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def small_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 21), nn.LayerNorm(21), nn.Linear(21, 4)).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps with gradients that are drawn; the last layer has none in step 2."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.grad = None if step == 2 and name.startswith("2.") else gradient
        set_learning_rate(optimizer, 0.01 * (step + 1))
        optimizer.step()


def assert_like_torch(implementation: str, device: torch.device) -> None:
    """Weights and every state after five steps, one of them with a frozen layer."""
    ours, theirs = small_model(device), small_model(device)
    config = OptimConfig(implementation=implementation, weight_decay=0.3, eps=1e-6)
    optimizer = build_optimizer(ours, config, device)
    reference = build_optimizer(theirs, OptimConfig(weight_decay=0.3, eps=1e-6), device)
    train(ours, optimizer, range(5))
    train(theirs, reference, range(5))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        state, expected = optimizer.state[one], reference.state[other]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert (state[name].shape, state[name].dtype) == (value.shape, value.dtype)
            torch.testing.assert_close(state[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-7)
    assert int(optimizer.state[ours.get_parameter("2.weight")]["step"]) == 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_adapter_gives_its_kernel_what_adamw_needs(
    implementation: str, stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_cpu, "PIECE", 100)  # the first matrix travels in eight pieces
    assert_like_torch(implementation, torch.device("cpu"))


def assert_resumes_bitwise(steps: int) -> None:
    """Half of the steps by one optimizer, the rest by another that has the first one's state. None of them freezes a
    layer: different step counts would hide what the kernel keeps from call to call."""
    device = torch.device("cpu")
    config = OptimConfig(implementation="deepspeed_cpu", betas=(0.9, 0.95))
    whole, halves = small_model(device), small_model(device)
    train(whole, build_optimizer(whole, config, device), range(3, 3 + steps))
    first = build_optimizer(halves, config, device)
    train(halves, first, range(3, 3 + steps // 2))
    second = build_optimizer(halves, config, device)
    second.state.update(first.state)
    train(halves, second, range(3 + steps // 2, 3 + steps))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halves.parameters(), strict=True))


def test_deepspeeds_powers_of_beta_do_not_depend_on_where_a_run_began(stand_ins: None) -> None:
    assert_resumes_bitwise(20)


def test_deepspeed_itself() -> None:
    """Its C++ kernel, compiled at first use."""
    if (reason := implementation_problem(OptimConfig(implementation="deepspeed_cpu"), "cpu")) != "":
        pytest.skip(reason)
    assert_like_torch("deepspeed_cpu", torch.device("cpu"))
    assert_resumes_bitwise(20)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_packages_on_a_gpu(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_cpu, "PIECE", 100)
    config = OptimConfig(implementation=implementation)
    if (reason := implementation_problem(config, "cuda")) != "":
        pytest.skip(reason)
    assert_like_torch(implementation, torch.device("cuda"))


@pytest.mark.parametrize("implementation", FUSED)
def test_an_absent_package_is_named_with_how_to_install_it(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OptimConfig(implementation=implementation)
    assert implementation_problem(config, None) == ""
    assert implementation_problem(config, "cpu") == "the run trains on cpu, a GPU needed"
    for name in ("amp_C", "transformer_engine_torch", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    problem = implementation_problem(config, "cuda")
    assert "cannot be used: ModuleNotFoundError" in problem
    assert "docs/how-to/optional-packages.md" in problem


def test_deepspeed_that_cannot_be_built_says_what_is_missing(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("cpu_adam failed") from RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(sys.modules["deepspeed.ops.adam"], "DeepSpeedCPUAdam", fails)
    monkeypatch.setattr(adamw_cpu, "find_spec", lambda _: object())
    model = small_model(torch.device("cpu"))
    for there, expected in (
        ({"g++"}, r"missing: ninja \(pip install ninja\)"),
        ({"g++", "ninja"}, "Ninja is required"),
    ):
        monkeypatch.setattr(adamw_cpu.shutil, "which", lambda name, there=there: name if name in there else None)
        with pytest.raises(LaunchError, match=expected):
            build_optimizer(model, OptimConfig(implementation="deepspeed_cpu"), torch.device("cpu"))
    monkeypatch.setattr(adamw_cpu, "find_spec", lambda _: None)
    config = OptimConfig(implementation="deepspeed_cpu")
    assert "pip install deepspeed" in implementation_problem(config, "cpu")
    with pytest.raises(LaunchError, match=r"missing: deepspeed \(pip install deepspeed\)"):
        build_optimizer(model, config, torch.device("cpu"))
