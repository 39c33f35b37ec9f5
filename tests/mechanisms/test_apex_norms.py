"""RMS norms by NVIDIA apex: torch's norms, by another kernel."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.apex_norms import ApexRMSNorm
from moba_train.model.transformer import Transformer
from moba_train.parallel.fsdp import use_norms


def norm_and_gradients(norm: Any, x: Tensor, gradient: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = norm(leaf)
    return [out.detach(), *torch.autograd.grad(out, [leaf, *norm.parameters()], gradient)]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The shapes that a stand-in for apex's kernel is given."""
    module = ModuleType("apex.normalization.fused_layer_norm")
    given: list[list[int]] = []

    def stand_in(x: Tensor, weight: Tensor, normalized_shape: list[int], eps: float) -> Tensor:
        given.append(normalized_shape)
        return F.rms_norm(x, normalized_shape, weight, eps)

    module.fused_rms_norm_affine = stand_in  # type: ignore[attr-defined]
    for name in ("apex", "apex.normalization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return given


def test_all_norms_of_a_model_are_replaced_and_keep_their_parameters(shapes: list[list[int]]) -> None:
    shape = ModelConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, layers=2, heads=2, kv_heads=1, qk_norm=True, norm_eps=0.1
    )
    model = Transformer(shape)
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    before = dict(model.named_parameters())
    inputs = [(torch.randn(5, *norm.normalized_shape), torch.randn(5, *norm.normalized_shape)) for norm in norms]
    want = [norm_and_gradients(norm, *given) for norm, given in zip(norms, inputs, strict=True)]
    use_norms(model, "apex")
    got = [norm_and_gradients(norm, *given) for norm, given in zip(norms, inputs, strict=True)]
    assert all(torch.equal(a, b) for one, other in zip(got, want, strict=True) for a, b in zip(one, other, strict=True))
    assert len(shapes) == len(norms) == 2 * 4 + 1
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_an_epsilon_has_torch_s(dtype: torch.dtype, shapes: list[list[int]]) -> None:
    norm = nn.Sequential(nn.RMSNorm(16, dtype=dtype))
    x = 0.01 * torch.randn(5, 16, dtype=dtype)
    wanted = norm(x)
    use_norms(norm, "apex")
    assert torch.equal(norm(x), wanted)
    assert shapes == [[16]]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ApexRMSNorm.problem("cpu") == "the run trains on cpu, a GPU needed"
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    problem = ApexRMSNorm.problem("cuda")
    assert "apex.normalization cannot be used: ModuleNotFoundError" in problem
    assert "docs/how-to/optional-packages.md" in problem


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "compiled"),
    [
        ((1000, 4096), torch.bfloat16, False),
        ((1000, 4096), torch.bfloat16, True),
        ((1000, 4096), torch.float32, False),
        ((77, 8, 128), torch.float16, False),
        ((5, 96), torch.bfloat16, False),
    ],
)
def test_apex_is_as_exact_as_torch(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    """Outputs and gradients against float64: at most twice torch's error."""
    if (reason := ApexRMSNorm.problem("cuda")) != "":
        pytest.skip(reason)
    torch.manual_seed(0)
    x, gradient = torch.randn(2, *shape, device="cuda").to(dtype)
    theirs = nn.RMSNorm(shape[-1], 1e-5, device="cuda", dtype=dtype)
    nn.init.normal_(theirs.weight, 1.0, 0.5)
    ours = nn.Sequential(nn.RMSNorm(shape[-1], 1e-5, device="cuda", dtype=dtype))
    ours[0].load_state_dict(theirs.state_dict())
    use_norms(ours, "apex")
    exact = nn.RMSNorm(shape[-1], 1e-5, device="cuda", dtype=torch.float64)
    exact.load_state_dict(theirs.state_dict())
    wanted = norm_and_gradients(exact, x.double(), gradient.double())
    plain = norm_and_gradients(theirs, x, gradient)
    got = norm_and_gradients(torch.compile(ours) if compiled else ours, x, gradient)
    for name, a, b, c in zip(("out", "dx", "dw"), got, plain, wanted, strict=True):
        assert a.dtype == dtype
        error, allowed = ((one.double() - c).norm() / c.norm() for one in (a, b))
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.1e}, torch {allowed:.1e}"
