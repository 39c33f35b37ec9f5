"""Kimi Delta Attention against the recurrence as Kimi Linear (arXiv:2510.26692) writes it, in float64."""

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.kind import StageContext
from moba_train.attention.layout import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.mechanisms.linear import kda
from moba_train.mechanisms.linear.delta import DeltaInputs, in_parts, most_rows
from moba_train.mechanisms.linear.fla import has_fla
from moba_train.mechanisms.linear.kda import KdaKind, KdaParameters
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_ranks_equal_one_device,
    flat,
    make_layer,
    results,
    run_layer,
    small_model,
    token_bytes,
)
from tests.attention.test_key_conv import mixed
from tests.tools.decoding_checks import assert_decodes_like_training

LENGTHS = [12, 0, 1, 27]
NAMES = (
    "A_log dt_bias q_conv.weight k_conv.weight v_conv.weight decay_down.weight decay_up.weight beta.weight "
    "gate_down.weight gate_up.weight norm.weight"
)


def convolved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu of the last four rows' weighted sum; `x` [T, heads, d] of one document."""
    total = mixed(x, weight.flip(1), [len(x)])
    return total / (1 + torch.exp(-total))


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def oracle(layer: Layer, lengths: list[int] = LENGTHS) -> list[torch.Tensor]:
    """The layer's output."""
    p, x = layer.parameters, layer.x
    step = torch.log1p(torch.exp(x @ p.decay_down.weight.T @ p.decay_up.weight.T + p.dt_bias)).view_as(layer.q)
    alpha = torch.exp(-torch.exp(p.A_log)[:, None] * step)
    gate = 1 / (1 + torch.exp(-x @ p.gate_down.weight.T @ p.gate_up.weight.T))
    return delta_oracle(layer, lengths, alpha, gate)


def delta_oracle(layer: Layer, lengths: list[int], alpha: torch.Tensor, gates: torch.Tensor) -> list[torch.Tensor]:
    """The layer's output, document by document, head by head, token by token, with the transition as a matrix; `alpha`:
    decays [T, heads, d]; `gates`: of the outputs, [T, heads * d]."""
    p, heads, width = layer.parameters, MODEL.heads, MODEL.head_width
    group = heads // MODEL.kv_heads
    rows, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        first += length
        if not length:
            continue
        x = layer.x[part]
        q = unit(convolved(layer.q[part], p.q_conv.weight)) / width**0.5
        k = unit(convolved(layer.k[part], p.k_conv.weight))
        v = convolved(layer.v[part], p.v_conv.weight)
        decay, gate = alpha[part], gates[part]
        beta = 1 / (1 + torch.exp(-x @ p.beta.weight.T))
        for token in range(length):
            if token == 0:
                states = [torch.zeros(width, width, dtype=x.dtype)] * heads
            outputs = []
            for head in range(heads):
                key, value = k[token, head // group], v[token, head // group]
                erase = torch.eye(width, dtype=x.dtype) - beta[token, head] * torch.outer(key, key)
                states[head] = erase @ torch.diag(decay[token, head]) @ states[head]
                states[head] = states[head] + beta[token, head] * torch.outer(key, value)
                out = states[head].T @ q[token, head]
                outputs.append(out / (out.square().mean() + MODEL.norm_eps).sqrt() * p.norm.weight)
            rows.append(torch.stack(outputs) * gate[token].view(heads, width))
    return [torch.stack(rows)]


def test_output_and_every_gradient_are_those_of_the_oracle() -> None:
    layer = make_layer("kda", {}, LENGTHS)
    got, want = results(layer), results(layer, oracle)
    assert set(got[2]) == set(NAMES.split())
    assert all(x.any() for x in flat(want))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


def context(**changes: Any) -> StageContext:
    values = {"seq_len": 64, "cp": 1, "tp": 1, "deterministic": False, "device": "cpu", "layers": "in layer 0"}
    return StageContext(**{"model": MODEL, **values, **changes})


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 16, 50])
def test_the_rule_part_by_part(rows: int, with_states: bool) -> None:
    """Segments that end inside a part, at its end, and that go on; outputs, states behind, every gradient."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0, 5, 7, 32, 48])
    sizes = [(48, 4, 8), (48, 2, 8), (48, 2, 8), (48, 4, 8), (48, 4), (4,), (32,)]
    leaves = [torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    states = torch.randn(4, 4, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    initial = states if with_states else None
    rule = KdaKind(KdaKind.Options(backend="torch"), 8)._rule

    def gradients(out: torch.Tensor, behind: torch.Tensor | None) -> list[torch.Tensor]:
        if behind is None:
            assert not with_states
            return [out, *torch.autograd.grad(out.sin().sum(), leaves)]
        assert with_states
        return [out, behind, *torch.autograd.grad(out.sin().sum() + behind.cos().sum(), [*leaves, states])]

    whole = gradients(*rule(DeltaInputs(*leaves), (edges, edges), initial, with_states))

    def part(rows: Sequence[torch.Tensor], before: Any, *arguments: Any) -> Any:
        assert before is None
        return rule(DeltaInputs(*rows, *leaves[5:]), *arguments)

    parts = gradients(*in_parts(part, tuple(leaves[:5]), (edges, edges), initial, with_states, most=rows))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [5, 8, 21])
@pytest.mark.parametrize("lengths", [LENGTHS, [40], [2, 1, 1, 1, 1, 1, 4, 20]], ids=str)
def test_the_layer_part_by_part(rows: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that end inside a part, at its end, 1 to 3 tokens before it, and that go on."""
    want = results(make_layer("kda", {}, lengths))
    monkeypatch.setattr(kda, "most_rows", lambda channels, rows=rows: rows)
    torch.testing.assert_close(results(make_layer("kda", {}, lengths)), want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("channels", [100, 384, 1024, 2047])
def test_parts_of_narrow_layers_are_longer_and_as_large(channels: int) -> None:
    assert most_rows(8192) == most_rows(2048) == 8192
    assert most_rows(channels) % 64 == 0
    assert 0 <= 8192 * 2048 - most_rows(channels) * channels < 64 * channels


def test_gradients_of_parts_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights' gradients of 40 parts, in bfloat16, are as exact as those of two."""
    errors = []
    want = results(make_layer("kda", {}, [200]))[2]
    for rows in (100, 5):
        monkeypatch.setattr(kda, "most_rows", lambda channels, rows=rows: rows)
        layer = make_layer("kda", {}, [200])
        for tensor in (*layer.inputs(), *layer.parameters.parameters()):
            tensor.data = tensor.data.bfloat16()
        got = results(layer)[2]
        errors.append({name: ((got[name] - want[name]).norm() / want[name].norm()).item() for name in want})
    for name, error in errors[1].items():
        assert error < 1.2 * errors[0][name] + 1e-3, name


def test_a_layer_in_parts_keeps_its_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """x, q, k, v are its input; kept besides are the states between four parts and the rows before them."""
    monkeypatch.setattr(kda, "most_rows", lambda channels: 16)
    layer = make_layer("kda", {}, [64])
    inputs = {x.untyped_storage().data_ptr() for x in [*layer.inputs(), *layer.parameters.parameters()]}
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run_layer(layer)
    states = 4 * MODEL.heads * MODEL.head_width**2
    tails = 3 * 3 * (MODEL.hidden_size + (MODEL.heads + 2 * MODEL.kv_heads) * MODEL.head_width)
    own = sum(size for place, size in kept.items() if place not in inputs)
    assert own <= 8 * (states + tails)
    planned = [
        token_bytes(layer.kind, width=8, tokens=tokens, cp=cp).activations for tokens, cp in ((16, 1), (17, 1), (17, 2))
    ]
    assert planned[0] == planned[2] > planned[1] == 0


def test_backends_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(backend: str = "auto", **changes: Any) -> list[Any]:
        return list(KdaKind.problems(KdaKind.Options(backend=backend), context(**changes)))

    assert problems() == problems(device=None) == problems("torch", device="cuda") == []
    assert problems("fla")[0].startswith("backend: given 'fla' in layer 0, which cannot run: the run trains on cpu")
    monkeypatch.setattr("moba_train.mechanisms.linear.fla.has_fla", lambda: False)
    assert (
        "given 'auto' in layer 0, which cannot run: the package fla-core is not installed" in problems(device="cuda")[0]
    )
    monkeypatch.setattr("moba_train.mechanisms.linear.fla.has_fla", lambda: True)
    assert problems(device="cuda") == []
    assert "deterministic: true" in problems(device="cuda", deterministic=True)[0]
    wide = MODEL.model_copy(update={"head_dim": 512})
    assert "head dim 512, at most 256 supported" in problems(device="cuda", model=wide)[0]
    with pytest.raises(ValueError, match=r"attention\.kda\.backend: 'fla' cannot run: tensors are on cpu"):
        run_layer(make_layer("kda", {"backend": "fla"}, LENGTHS))


def test_compiled_layers_under_activation_checkpointing() -> None:
    compiled = torch.compile(run_layer, backend="aot_eager")
    got = results(make_layer("kda", {}, LENGTHS), lambda layer: checkpoint(compiled, layer, use_reentrant=False))
    torch.testing.assert_close(got, results(make_layer("kda", {}, LENGTHS)), rtol=0, atol=1e-12)


def test_initial_values() -> None:
    """In their ranges, by name and seed alone; decays between exp(-0.1 * 16) and exp(-0.001)."""
    model = small_model("kda", {})
    blocks: list[Any] = list(model.blocks)
    first, second = (block.attention.kda for block in blocks)
    assert not torch.equal(first.A_log, second.A_log)
    assert ((first.A_log >= 0) & (first.A_log <= torch.tensor(16.0, dtype=torch.float64).log())).all()
    step = torch.nn.functional.softplus(first.dt_bias)
    assert step.min() > 0.0009
    assert step.max() < 0.11
    assert step.log().std() > 0.5
    weight = first.q_conv.weight
    assert weight.abs().max() <= 0.5
    assert weight.abs().max() > 0.4
    assert abs(weight.mean()) < 0.1
    assert torch.equal(first.norm.weight, torch.ones_like(first.norm.weight))
    again = small_model("kda", {})
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), again.parameters(), strict=True))


def test_flops_and_pairs() -> None:
    kind = KdaKind(KdaKind.Options(), MODEL.head_width)
    lengths = [5, 1, 7]
    earlier = sum(1 for length in lengths for query in range(length) for _ in range(query))
    assert kind.pairs(MODEL, lengths) == earlier + 0.5 * sum(lengths)
    matrices = 2 * (32 * 8 + 8 * 32) + 32 * 4 + 4 * (32 + 16 + 16)
    assert kind.flops(MODEL, lengths) == 13 * (3 * 4 * 3 * 2 * 8 * 8 + 6 * matrices)


def stand_in(recomputed: bool | None = None) -> Callable[..., Any]:
    """`chunk_kda` with the interface of fla-core 0.6.0, one token after the other."""

    def chunk_kda(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        scale: float | None = None,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert options["use_gate_in_kernel"]
        assert not {"use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel"} & set(options)
        assert recomputed is None or options["disable_recompute"] is recomputed
        edges = options["cu_seqlens_cpu"].tolist()
        assert options["cu_seqlens"].tolist() == edges
        q, k, v, g, beta = (x[0] for x in (q, k, v, g, beta))
        alpha = -options["A_log"].exp()[:, None] * torch.nn.functional.softplus(g + options["dt_bias"].view_as(g[0]))
        out, states = kda.delta_attention(q * q.shape[-1] ** -0.5, k, v, alpha, beta, edges, initial_state)
        return out[None], states if output_final_state else None

    return chunk_kda


def test_what_fla_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.kda")}
    modules["fla.ops.kda"].chunk_kda = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kda, "fla_refuses", lambda x: "")
    options = {"backend": "fla"}
    want = results(make_layer("kda", {}, LENGTHS))
    torch.testing.assert_close(results(make_layer("kda", options, LENGTHS)), want, rtol=0, atol=1e-11)
    assert_decodes_like_training("kda", options)
    assert_ranks_equal_one_device(make_layer("kda", options, LENGTHS), STRATEGIES[0], atol=1e-10)
    monkeypatch.setattr(kda, "most_rows", lambda channels: 8)
    modules["fla.ops.kda"].chunk_kda = stand_in(recomputed=True)
    torch.testing.assert_close(results(make_layer("kda", options, LENGTHS)), want, rtol=0, atol=1e-11)


@pytest.mark.gpu
def test_fla_gives_what_plain_pytorch_gives() -> None:
    if not has_fla():
        pytest.skip("needs fla-core")
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [70, 1, 0, 129]
    shard = LOCAL_ENGINE.shard(packed_layout(lengths, "cuda"))
    heads = (4, 4, 4, 4)
    q, k, v, decay = (
        torch.randn(200, count, 64, device="cuda", generator=generator).bfloat16().requires_grad_() for count in heads
    )
    beta = torch.randn(200, 4, device="cuda", generator=generator).bfloat16().requires_grad_()
    model = MODEL.model_copy(update={"head_dim": 64})
    with torch.device("cuda"):
        parameters = KdaParameters(model)
    for name in ("A_log", "dt_bias"):
        values = KdaKind.initial_values(name, getattr(parameters, name).shape, generator)
        getattr(parameters, name).data.copy_(values)
    leaves = DeltaInputs(q, k, v, decay, beta, parameters.A_log, parameters.dt_bias)
    found = []
    for backend in ("fla", "torch"):
        out, _ = KdaKind(KdaKind.Options(backend=backend), 64)._attend(leaves, shard, False)
        found.append([out, *torch.autograd.grad((out.float().sin() * decay.detach()).sum(), leaves)])
    for index, (fla, plain) in enumerate(zip(*found, strict=True)):
        difference = (fla.float() - plain.float()).norm() / plain.float().norm()
        assert difference < 2e-2, index


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 128])
def test_fla_as_a_whole_and_part_by_part(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 against float64, with decays as they are at the start of training: outputs and every gradient. With far
    stronger decays TF32, in which the kernels multiply, makes the gradient of `A_log` uncertain by 12 %."""
    if not has_fla():
        pytest.skip("needs fla-core")
    monkeypatch.setattr(kda, "most_rows", lambda channels: rows)
    assert_fla_is_near_float64("kda")


def assert_fla_is_near_float64(kind: str) -> None:
    """Output and every gradient of the kernels in bf16 on a GPU are those of plain PyTorch in float64."""
    lengths = [300, 1, 129, 82]
    model = MODEL.model_copy(update={"head_dim": 64, "hidden_size": 64})
    found = []
    for backend, device, dtype in (("fla", "cuda", torch.bfloat16), ("torch", "cpu", torch.float64)):
        layer = make_layer(kind, {"backend": backend}, lengths, model=model)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in layer.named_parameters().items():
            initial = KINDS[kind].initial_values(name, parameter.shape, generator)
            parameter.data = parameter.data / 8 if initial is None else initial
        for tensor in (*layer.inputs(), *layer.named_parameters().values()):
            tensor.data = tensor.data.bfloat16().to(device, dtype)
        layer.layout = packed_layout(lengths, device)
        found.append(flat(results(layer)))
    for index, (fla, exact) in enumerate(zip(*found, strict=True)):
        assert (fla.cpu().double() - exact).norm() < 2e-2 * exact.norm(), index
