"""Muon against its definition in float64, against torch's, and which parameters it takes."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from moba_train.config.optim import OptimConfig
from moba_train.config.schema import RunConfig
from moba_train.mechanisms.muon import muon
from moba_train.mechanisms.muon.muon import COEFFICIENTS, orthogonalize
from moba_train.model.build import build_model
from moba_train.optim.registry import build_optimizer, set_learning_rate
from moba_train.optim.spec import block_matrices
from tests.resolved import spec_of

CPU = torch.device("cpu")
SHAPES = [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)]


class Blocks(nn.Module):
    """A model whose blocks are linear layers of these shapes [rows, columns]."""

    def __init__(self, shapes: Sequence[tuple[int, int]] = SHAPES, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = [
            nn.Linear(columns, rows, bias=index == 0, dtype=dtype) for index, (rows, columns) in enumerate(shapes)
        ]
        self.blocks = nn.ModuleList(self.layers)
        self.norm = nn.RMSNorm(4, dtype=dtype)
        self.output = nn.Linear(4, 3, bias=False, dtype=dtype)


def by_singular_values(matrix: Tensor, steps: int) -> Tensor:
    """The polynomial on each singular value, in float64."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    a, b, c = COEFFICIENTS
    s = s / s.norm().clamp(min=1e-7)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


def gradients_of(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in model.named_parameters()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for name, gradient in gradients_of(model, number).items():
        model.get_parameter(name).grad = gradient
    optimizer.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.05)])
def test_orthogonalizing_is_the_polynomial_on_the_singular_values(
    shape: tuple[int, int], dtype: torch.dtype, error: float
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    found = orthogonalize(matrix)
    assert found.dtype == dtype
    expected = by_singular_values(matrix, 5)
    assert (found.double() - expected).norm() < error * expected.norm()


def test_the_update_has_singular_values_near_one_and_zeros_stay() -> None:
    found = torch.linalg.svdvals(orthogonalize(torch.randn(32, 64, dtype=torch.float64)))
    assert 0.68 < found.min() <= found.max() < 1.14
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_several_steps_follow_the_definition_in_float64(scale: muon.MuonScale) -> None:
    model = Blocks()
    options = {"momentum": 0.8, "scale": scale}
    config = OptimConfig(kind="muon", weight_decay=0.3, muon=options)
    optimizer = build_optimizer(model, config, CPU)
    weights = {name: weight.detach().clone() for name, weight in block_matrices(model).items()}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number, lr in enumerate((0.1, 0.02, 0.05)):
        set_learning_rate(optimizer, lr)
        step(model, optimizer, number)
        for name, gradient in gradients_of(model, number).items():
            if name not in weights:
                continue
            means[name] = 0.8 * means[name] + 0.2 * gradient
            mixed = 0.2 * gradient + 0.8 * means[name]
            rows, columns = gradient.shape
            factor = 0.2 * math.sqrt(max(rows, columns)) if scale != "original" else math.sqrt(max(1, rows / columns))
            weights[name] -= lr * (0.3 * weights[name] + factor * by_singular_values(mixed, 5))
    for name, weight in weights.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(optimizer.state[model.get_parameter(name)]["momentum_buffer"], means[name])


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_it_is_torchs_muon_up_to_bf16(scale: muon.MuonScale, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_compute_dtype", lambda _: torch.bfloat16)
    ours, theirs = Blocks([(48, 32)], torch.float32), Blocks([(48, 32)], torch.float32)
    start = ours.layers[0].weight.detach().clone()
    optimizer = build_optimizer(ours, OptimConfig(kind="muon", lr=0.02, muon={"scale": scale}), CPU)
    reference = torch.optim.Muon([theirs.layers[0].weight], lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    for number in range(3):
        step(ours, optimizer, number)
        step(theirs, reference, number)
    difference = ours.layers[0].weight - theirs.layers[0].weight
    assert difference.norm() < 0.03 * (theirs.layers[0].weight - start).norm()


def test_its_update_has_the_size_of_adamws() -> None:
    """Root mean square 0.2, AdamW's, for a matrix of any shape."""
    for shape in ((64, 64), (32, 256), (300, 40)):
        update = orthogonalize(torch.randn(shape, dtype=torch.float64)) * muon.update_scale(shape, "match_rms_adamw")
        assert update.square().mean().sqrt() == pytest.approx(0.2, rel=0.15)


def test_the_other_parameters_are_adamws() -> None:
    """Bit by bit, and all state lies in one place."""
    ours, theirs = Blocks(), Blocks()
    optimizer = build_optimizer(ours, OptimConfig(kind="muon", lr=0.01), CPU)
    reference = build_optimizer(theirs, OptimConfig(kind="adamw", lr=0.01), CPU)
    for number in range(3):
        step(ours, optimizer, number)
        step(theirs, reference, number)
    others = ours.state_dict().keys() - block_matrices(ours).keys()
    assert others == {"blocks.0.bias", "norm.weight", "output.weight"}
    for name in others:
        assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name)), name
    assert {len(state) for state in optimizer.state.values()} == {1, 3}
    assert len(optimizer.state) == len(list(ours.parameters()))


COMMON_MATRICES = {
    *(f"attention.{part}_proj" for part in "qkvo"),
    *(f"feed_forward.{part}_proj" for part in ("gate", "up", "down")),
}


def matrices_and_others(kinds: Sequence[str]) -> tuple[set[str], set[str]]:
    """Names of the parameters of a model that has a layer of each kind, `moba` first: Muon's matrices, and all others
    of more than one dimension."""
    config = RunConfig.model_validate(
        {
            "name": "kinds",
            "run_dir": "unused",
            "model": {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "layers": len(kinds), "heads": 4}
            | {"kv_heads": 2, "qkv_bias": True, "qk_norm": True},
            "attention": {
                "default": "moba",
                "moba": {"block_size": 16, "topk": 2, "key_conv": 3},
                "overrides": {layer: {"kind": kind} for layer, kind in enumerate(kinds) if layer},
            },
            "data": {"train": [{"path": "a"}]},
            "batch_tokens": 512,
            "stages": [{"name": "only", "seq_len": 64, "tokens": 512}],
        }
    )
    with torch.device("meta"):
        model = build_model(spec_of(config))
    matrices = set(block_matrices(model))
    return matrices, {name for name, parameter in model.named_parameters() if parameter.dim() > 1} - matrices


def test_every_projection_is_a_matrix_by_itself_and_a_convolution_is_none() -> None:
    matrices, others = matrices_and_others(["moba", "full"])
    assert matrices == {f"blocks.{layer}.{name}.weight" for layer in range(2) for name in COMMON_MATRICES}
    assert others == {"embedding.weight", "output.weight", "blocks.0.attention.moba.weight"}


@pytest.mark.gpu
def test_on_a_gpu_the_update_is_that_of_the_cpu_up_to_bf16() -> None:
    shapes = [(256, 192), (64, 512)]
    here, there = Blocks(shapes, torch.float32), Blocks(shapes, torch.float32).cuda()
    start = [parameter.detach().clone() for parameter in here.blocks.parameters()]
    config = OptimConfig(kind="muon", lr=0.02)
    optimizers = [
        build_optimizer(model, config, torch.device(name)) for model, name in ((here, "cpu"), (there, "cuda"))
    ]
    for number in range(3):
        for name, gradient in gradients_of(here, number).items():
            here.get_parameter(name).grad = gradient
            there.get_parameter(name).grad = gradient.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, begun in zip(here.blocks.parameters(), there.blocks.parameters(), start, strict=True):
        assert (one - other.cpu()).norm() < 0.03 * (one - begun).norm()
