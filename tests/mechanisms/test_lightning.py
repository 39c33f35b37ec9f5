"""Lightning attention against the recurrence as Qin et al. 2024 (arXiv:2401.04658) write it, in float64."""

import math
import sys
import types
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moba_train.attention.kind import StageContext
from moba_train.attention.layout import TokenRange, packed_layout
from moba_train.mechanisms.linear import lightning
from moba_train.mechanisms.linear.decayed import decayed_attention
from moba_train.mechanisms.linear.fla import has_fla
from moba_train.mechanisms.linear.lightning import LightningKind, log_decays
from moba_train.mechanisms.linear.states import segment_edges
from tests.attention.kind_checks import MODEL, Layer, flat, make_layer, results, run_layer, token_bytes

LENGTHS = [12, 0, 1, 27]
OPTIONS = [{}, {"decay": "geometric"}]


def decays(decay: str, heads: int, layer: int, layers: int) -> list[float]:
    """lambda of each head by the formulas, one by one."""
    if decay == "linear":
        return [math.exp(-(8 / heads) * (1 - layer / layers) * h) for h in range(1, heads + 1)]
    return [math.exp(-(2 ** (-8 * h / heads)) * (1 - layer / (layers - 1) + 1e-5)) for h in range(1, heads + 1)]


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: Sequence[float] | torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """[T, H, d]: token by token and head by head, with an empty state where a document begins."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for head, factor in enumerate(decay):
        outputs: list[torch.Tensor] = []
        for length in lengths:
            state = q.new_zeros(q.shape[-1], v.shape[-1])
            for token in range(len(outputs), len(outputs) + length):
                state = factor * state + torch.outer(k[token, head // group], v[token, head // group])
                outputs.append(q[token, head] @ state)
        rows.append(torch.stack(outputs))
    return torch.stack(rows, 1)


def oracle(layer: Layer, lengths: list[int] = LENGTHS, index: int = 0) -> list[torch.Tensor]:
    """The layer's output from the paper's formulas."""
    options, parameters = layer.kind.options, layer.parameters
    decay = decays(options.decay, MODEL.heads, index, MODEL.layers)
    out = recurrence(silu(layer.q), silu(layer.k), layer.v, decay, lengths).flatten(1)
    normed = out / (out.square().mean(-1, keepdim=True) + MODEL.norm_eps).sqrt() * parameters.norm.weight
    gate = 1 / (1 + torch.exp(-layer.x @ parameters.gate.weight.T))
    return [(normed * gate).view_as(layer.q)]


def make(options: dict[str, Any], lengths: list[int] = LENGTHS, index: int = 0) -> Layer:
    return make_layer("lightning", options, lengths, layer=index)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("index", [0, 1])
def test_output_and_every_gradient_are_those_of_the_oracle(options: dict[str, str], index: int) -> None:
    layer = make(options, index=index)
    got, want = results(layer), results(layer, partial(oracle, index=index))
    assert set(got[2]) == {"gate.weight", "norm.weight"}
    assert all(x.any() for x in flat(want))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("chunk_size", "chunks_at_once"), [(1, 1), (4, 3), (16, 1), (64, 64)])
@pytest.mark.parametrize("lengths", [[3, 1, 0, 8, 20, 5], [37]])
def test_chunks_give_what_the_recurrence_gives(chunk_size: int, chunks_at_once: int, lengths: list[int]) -> None:
    """Documents begin and end anywhere in chunks and groups of chunks."""
    tokens = 37
    generator = torch.Generator().manual_seed(1)
    q, k, v, weights = (
        torch.randn(tokens, heads, 6, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2, 4)
    )
    log_decay = torch.tensor([0.0, -0.01, -1.0, -40.0], dtype=torch.float64)
    documents = packed_layout(lengths).q_documents
    got = decayed_attention(q, k, v, log_decay, documents, chunk_size, chunks_at_once)
    want = recurrence(silu(q), silu(k), v, log_decay.exp(), lengths)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_operator_are_registered_correctly() -> None:
    q, k, v = (torch.randn(9, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    arguments = (q, k, v, torch.tensor([-0.1, -2.0], dtype=torch.float64), torch.zeros(9, dtype=torch.int64), 4, 2)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.moba_train.decayed_attention.default, arguments, test_utils=checks)


def test_strong_decays_over_long_sequences_stay_finite() -> None:
    """8 a token over 3000 tokens: lambda to this power is 0 in float32, and its inverse would be infinite."""
    q, k, v = (torch.randn(3000, 1, 4).requires_grad_() for _ in range(3))
    out = decayed_attention(q, k, v, torch.tensor([-8.0]), torch.zeros(3000, dtype=torch.int64))
    out.sum().backward()
    assert all(x is not None and x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
    own = ((silu(q) * silu(k)).sum(-1, keepdim=True) * v).detach()
    torch.testing.assert_close(out.detach(), own, rtol=0, atol=2e-2)


def test_heads_count_from_one_and_layers_from_zero() -> None:
    """The first layer's last head forgets by exp(-8) a token; MiniMax-01's 64 heads begin with 2^(-1/8)."""
    assert log_decays("linear", 16, 0, 32)[-1] == -8
    assert log_decays("linear", 16, 16, 32)[0] == pytest.approx(-0.25)
    geometric = log_decays("geometric", 64, 0, 80)
    assert geometric[0] == pytest.approx(-(2**-0.125) * 1.00001)
    assert geometric[-1] == pytest.approx(-(2**-8) * 1.00001)
    assert log_decays("geometric", 64, 79, 80)[0] == pytest.approx(-(2**-0.125) * 1e-5)
    assert (log_decays("geometric", 4, 0, 1) < 0).all()


def test_decays_survive_meta_and_lower_precision() -> None:
    with torch.device("meta"):
        parameters: Any = LightningKind.parameters(LightningKind.Options(), MODEL, 1)
    assert parameters.log_decays.is_meta
    parameters.to_empty(device="cpu").bfloat16()
    assert torch.equal(parameters.log_decays[0], log_decays("linear", 4, 1, 2))
    assert torch.equal(parameters.log_decays[1], log_decays("geometric", 4, 1, 2))
    assert set(parameters.state_dict()) == {"gate.weight", "norm.weight"}


def test_a_stage_may_change_the_decay() -> None:
    """The parameters are made once, with the options of one stage."""
    layer = make({})
    layer.kind = LightningKind(LightningKind.Options(decay="geometric"), MODEL.head_width)
    torch.testing.assert_close(run_layer(layer), oracle(layer), rtol=0, atol=1e-11)


def test_compiled_layers_under_activation_checkpointing() -> None:
    """The recomputation finds in the layout what the forward pass has put there."""
    compiled = torch.compile(run_layer, backend="aot_eager")
    got = results(make({}), lambda layer: checkpoint(compiled, layer, use_reentrant=False))
    torch.testing.assert_close(got, results(make({})), rtol=0, atol=1e-12)


def test_flops_and_pairs() -> None:
    """Pairs by counting; FLOPs of the recurrence by its products."""
    kind = LightningKind(LightningKind.Options(), MODEL.head_width)
    lengths = [5, 1, 7]
    earlier = sum(1 for length in lengths for query in range(length) for _ in range(query))
    assert kind.pairs(MODEL, lengths) == earlier + 0.5 * sum(lengths)
    products = 2 * 8 * 8 + 2 * 8 * 8
    matrix = 2 * 32 * 32
    assert kind.flops(MODEL, lengths) == 3 * (4 * products + matrix) * 13


def test_planned_activations_are_what_the_backward_pass_keeps() -> None:
    layer = make({"backend": "torch"}, [64])
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        (out,) = run_layer(layer)
    kept[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()  # o_proj keeps its input
    for parameter in (*layer.parameters.parameters(), layer.x):
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    own = sum(kept.values()) - 64 * 8 * 8 * (2 * 4 + 2 * 2)  # queries, keys, values and output, which every kind keeps
    planned = 64 * token_bytes(layer.kind, width=8).activations
    assert planned <= own <= planned + 64 * 16  # and the segment of each token


def context(**changes: Any) -> StageContext:
    values = {"seq_len": 64, "cp": 2, "tp": 1, "deterministic": False, "device": "cpu", "layers": "in layer 0"}
    return StageContext(MODEL, **{**values, **changes})


def test_backends_that_cannot_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def problems(backend: str, **changes: Any) -> list[Any]:
        return list(LightningKind.problems(LightningKind.Options(backend=backend), context(**changes)))

    assert problems("auto") == problems("torch") == []
    (problem,) = problems("fla")
    assert problem.startswith("backend: given 'fla' in layer 0, which cannot run: the run trains on cpu")
    monkeypatch.setattr("moba_train.mechanisms.linear.fla.has_fla", lambda: False)
    assert "fla-core is not installed" in problems("fla", device="cuda")[0]
    assert problems("fla", device=None) == []
    monkeypatch.setattr("moba_train.mechanisms.linear.fla.has_fla", lambda: True)
    assert problems("fla", device="cuda") == []
    assert "deterministic: true" in problems("fla", device="cuda", deterministic=True)[0]
    with pytest.raises(ValueError, match=r"attention\.lightning\.backend: 'fla' cannot run: tensors are on cpu"):
        run_layer(make({"backend": "fla"}))


def test_segments_given_to_fla() -> None:
    whole = packed_layout([5, 0, 3, 4])
    assert segment_edges(whole)[1].tolist() == [0, 5, 8, 12]
    shard = whole.part((TokenRange(2, 6), TokenRange(7, 10)), None)
    assert segment_edges(shard)[1].tolist() == [0, 3, 4, 5, 7]


def test_what_fla_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has the interface of fla-core 0.6.0 and takes one token after the other."""

    def chunk_simple_gla(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: None = None,
        g_gamma: Any = None,
        scale: Any = None,
        *,
        cu_seqlens: torch.Tensor,
        cu_seqlens_cpu: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        assert g is None
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens_cpu.diff().tolist()
        assert min(lengths) > 0
        return recurrence(scale * q[0], k[0], v[0], g_gamma.exp(), lengths)[None], None

    modules: dict[str, Any] = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.simple_gla")}
    modules["fla.ops.simple_gla"].chunk_simple_gla = chunk_simple_gla
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(lightning, "fla_refuses", lambda x: "")
    want = results(make({}), oracle)
    torch.testing.assert_close(results(make({"backend": "fla"})), want, rtol=0, atol=1e-4)  # fla's decays are float32


@pytest.mark.gpu
def test_fla_gives_what_plain_pytorch_gives() -> None:
    if not has_fla():
        pytest.skip("needs fla-core")
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = [700, 1, 63, 0, 1284]
    layout = packed_layout(lengths, "cuda")
    layout = layout.part((TokenRange(0, 900), TokenRange(1000, 2048)), None)
    made = [
        torch.randn(1948, heads, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
        for heads in (8, 2, 2, 8)
    ]
    q, k, v, weights = made
    log_decay = log_decays("geometric", 8, 2, 4).cuda()
    found = []
    for backend in ("fla", "torch"):
        kind = LightningKind(LightningKind.Options(backend=backend), 64)
        out = kind._attend(q, k, v, log_decay, layout)
        found.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for fla, plain in zip(*found, strict=True):
        difference = (fla.float() - plain.float()).norm() / plain.float().norm()
        assert difference < 1e-2


@pytest.mark.gpu
def test_a_gpu_without_fla_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning, "has_fla", lambda: False)
    monkeypatch.setattr("moba_train.mechanisms.linear.fla.has_fla", lambda: False)
    kind = LightningKind(LightningKind.Options(), 8)
    x = torch.randn(4, 2, 8, device="cuda")
    with pytest.warns(UserWarning, match="plain PyTorch: the package fla-core"):
        kind._attend(x, x, x, torch.tensor([-1.0, -2.0], device="cuda"), packed_layout([4], "cuda"))
