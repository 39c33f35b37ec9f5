"""Experts on a GPU, in bf16: grouped products against the loop, no wait for the GPU, the same bits again, compiled."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from moba_train.config.model import ModelConfig
from moba_train.mechanisms.experts import products
from moba_train.mechanisms.experts.exchange import named
from moba_train.mechanisms.experts.experts import MixtureOfExperts
from moba_train.mechanisms.experts.router import Router
from moba_train.parallel.world import World
from tests.mechanisms.experts_model import drawn, options
from tests.run.tiny_run import Run

EXPERTS = 16
HIDDEN = 64
WIDTH = 48
TOKENS = 700
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS: list[dict[str, Any]] = [{}, {"bias": True, "clamp": 2.0, "shared_gate": True}]
"""SwiGLU; the experts of gpt-oss, and the gate of Qwen3-Next's shared one."""


def layer_on(device: str, dtype: torch.dtype, **further: Any) -> MixtureOfExperts:
    """A layer with drawn weights, rounded to bf16 whatever the dtype."""
    given = options(experts=EXPERTS, active=4, intermediate_size=WIDTH, shared=1, **further)
    shape = ModelConfig(vocab_size=2, hidden_size=HIDDEN, intermediate_size=1, layers=1, heads=1, kv_heads=1)
    layer = MixtureOfExperts(given, shape)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(0.1 * drawn(*parameter.shape, seed=index).bfloat16())
    return layer.to(device, dtype)


def step(layer: Any, x: Tensor) -> list[Tensor]:
    """Result and gradients."""
    x = x.detach().requires_grad_()
    out, auxiliary = layer(x)
    (out.float().square().sum() + auxiliary.sum()).backward()
    assert x.grad is not None
    found = [out.detach(), x.grad]
    for parameter in layer.parameters():
        found.append(parameter.grad)
        parameter.grad = None
    return found


def need(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.mark.parametrize("further", OPTIONS, ids=["SwiGLU", "clamped"])
@pytest.mark.parametrize("device", DEVICES)
def test_grouped_products_in_bf16_are_those_of_the_loop_in_float32(
    device: str, further: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    need(device)
    assert (device, torch.bfloat16) in products.GROUPED
    x = drawn(TOKENS, HIDDEN).bfloat16().to(device)
    grouped = step(layer_on(device, torch.bfloat16, **further), x)
    monkeypatch.setattr(products, "GROUPED", set())
    looped = step(layer_on(device, torch.float32, **further), x.float())
    for got, want in zip(grouped, looped, strict=True):
        assert (got.float() - want).norm() <= 0.03 * want.norm()


@pytest.mark.parametrize("experts", [EXPERTS, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_a_router_of_bf16_loses_nothing_before_its_gradients_are_rounded(device: str, experts: int) -> None:
    """In float64, of the same numbers; one output is the gate of a shared expert."""
    need(device)
    router = Router(HIDDEN, experts, has_bias=True).to(device, torch.bfloat16)
    with torch.no_grad():
        for index, parameter in enumerate(router.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=index))
    x = drawn(TOKENS, HIDDEN).bfloat16().to(device).requires_grad_()
    gradient = drawn(TOKENS, experts, seed=7).to(device)
    logits = router(x, router.weight)
    assert logits.dtype == torch.float32
    logits.backward(gradient)
    weight = router.weight.double()
    assert router.bias is not None
    torch.testing.assert_close(logits.double(), x.double() @ weight.T + router.bias.double(), rtol=1e-5, atol=1e-5)
    half_step = torch.finfo(torch.bfloat16).eps / 2
    wanted = gradient.double() @ weight, gradient.double().T @ x.double()
    for of, want in zip((x, router.weight), wanted, strict=True):
        assert of.grad is not None
        torch.testing.assert_close(of.grad.double(), want, rtol=1.01 * half_step, atol=2e-4)


@pytest.mark.parametrize("further", OPTIONS, ids=["SwiGLU", "clamped"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_never_waits_for_the_gpu_and_repeats_bit_by_bit(device: str, further: dict[str, Any]) -> None:
    need(device)
    layer = layer_on(device, torch.bfloat16, **further)
    x = drawn(TOKENS, HIDDEN).bfloat16().to(device)
    rows = torch.arange(TOKENS, device=device)
    layer.count_tokens((rows, rows, torch.ones(TOKENS, device=device)))
    first = step(layer, x)  # what is loaded and made at the first call may wait
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        second = step(layer, x)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("further", OPTIONS, ids=["SwiGLU", "clamped"])
def test_the_layer_compiles_as_a_whole(further: dict[str, Any]) -> None:
    x = drawn(TOKENS, HIDDEN).bfloat16().cuda()
    plain = step(layer_on("cuda", torch.bfloat16, **further), x)
    layer = layer_on("cuda", torch.bfloat16, **further)
    layer.compile(fullgraph=True, dynamic=False)
    for got, want in zip(step(layer, x), plain, strict=True):
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_shared_experts_compute_while_rows_travel(device: str, alone: World) -> None:
    """Compiled code orders as it likes what does not depend on each other: it computed them after all transfers. Read
    from the code, whose calls run in the order of its lines. No balancing loss, whose product may stand anywhere."""
    need(device)
    layer = layer_on(device, torch.bfloat16, router={"balance": "none"})
    group = dist.group.WORLD
    assert group is not None
    layer.ep_group = named(group)
    layer.compile(fullgraph=True, dynamic=False)

    x = drawn(TOKENS, HIDDEN).bfloat16().to(device)
    with torch.no_grad():
        _, codes = run_and_get_code(layer, x)
    found = re.findall(r"extern_kernels\.(mm)\(|ops\.moba_train\.(\w+_(?:exchange|start))\.default\(", "".join(codes))
    calls = [product or operator for product, operator in found]
    ordered = ["start_exchange", "after_start", "mm", "mm", "mm", "finish_exchange"]
    begin = calls.index("start_exchange")
    assert calls[begin : begin + 6] == ordered, f"gate, up and down projection; in order: {', '.join(calls)}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_experts_trains(run: Run, corpora: Path, ranks: int) -> None:
    """Compiled, with half of the experts on each of two GPUs."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    run.recipe["model"] |= {"moe": {"experts": 4, "active": 2, "intermediate_size": 24}, "head_dim": 16}
    run.recipe |= {"compile": True, "parallel": {"ep": ranks}, "activation_checkpointing": "selective"}
    for stage in run.recipe["stages"]:
        stage["micro_batch_size"] = 2
    status, output = run.train_on_gpu(ranks)
    assert status == 0, output
    records = run.records()
    assert records[-1]["loss"] < records[0]["loss"]
    assert all(1 <= record["expert_load_max"] <= 4 for record in records)
