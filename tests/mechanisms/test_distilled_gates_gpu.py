"""The distilled gates on a GPU: the numbers of the CPU, kernels against the reference, and how much time and memory
they take."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.layout import layout_arguments, packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.mechanisms.gates import index_operators, seer_operators
from tests.attention.helpers import make_qkv
from tests.attention.kernel_checks import error
from tests.attention.kind_checks import MODEL, Layer, make_layer, results, run_layer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seer warmup": ("seer", {"mode": "warmup"}),
    "seer sparse": ("seer", {"train_gate": True}),
    "msa warmup": ("msa", {"mode": "warmup"}),
    "msa warmup, every eighth query": ("msa", {"mode": "warmup", "kl_every": 8}),
    "msa sparse": ("msa", {}),
    "msa, keys of groups": ("msa", {"index_keys": "group"}),
    "indexer warmup": ("indexer", {"mode": "warmup"}),
    "indexer sparse": ("indexer", {}),
    "indexer in two stages": ("indexer", {"index_heads": 2, "top_p": 0.9, "coarse": {"blocks": 8}}),
}
WIDE = ModelConfig(**(MODEL.model_dump() | {"hidden_size": 512, "heads": 8, "kv_heads": 2, "head_dim": 64}))
# With fewer heads the partial results of one key/value head's queries, all at once, outweigh everything else.
LARGE = WIDE.model_copy(update={"hidden_size": 2048, "heads": 32, "kv_heads": 8})
each = pytest.mark.parametrize("case", CASES)


def moved(layer: Layer, device: torch.device, dtype: torch.dtype, **options: Any) -> Layer:
    """A copy of the layer on a device in a dtype, of a kind with other options where some are given."""
    kind = layer.kind
    if options:
        given = kind.options.model_copy(update=options)
        kind = KINDS[kind.name](given, layer.model.head_width)
    inputs = [x.detach().to(device, dtype).requires_grad_() for x in layer.inputs()]
    parameters = copy.deepcopy(layer.parameters)
    lengths = layer.layout.cu_seqlens.diff().tolist()
    moved_parameters = None if parameters is None else parameters.to(device, dtype)
    return layer.with_inputs(inputs, kind=kind, parameters=moved_parameters, layout=packed_layout(lengths, device))


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Outputs and all gradients, each relative to the largest number of the wanted one."""
    for ours, theirs in zip(got, want, strict=True):
        pairs = zip(*(x.values() if isinstance(x, dict) else x for x in (ours, theirs)), strict=True)
        for one, other in pairs:
            difference = (one.double().cpu() - other.double().cpu()).abs().max()
            assert difference <= tolerance * other.double().abs().max().clamp(min=1e-3).cpu()


@pytest.mark.gpu
@each
def test_float32_gives_the_numbers_of_the_cpu(case: str, device: torch.device) -> None:
    name, options = CASES[case]
    layer = make_layer(name, options | {"block_size": 4, "topk": 11}, [12, 0, 1, 27, 60])  # coarse blocks hold them all
    assert_close(results(moved(layer, device, torch.float32)), results(layer), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", ["seer sparse", "msa sparse", "msa, keys of groups", "indexer sparse", "indexer in two stages"]
)
def test_kernels_attend_to_the_selected_blocks_as_the_reference_does(case: str, device: torch.device) -> None:
    name, options = CASES[case]
    layer = make_layer(name, options | {"block_size": 64, "topk": 4}, [700, 0, 1, 1000], model=WIDE)
    triton, reference = (
        results(moved(layer, device, torch.bfloat16, backend=backend)) for backend in ("triton", "reference")
    )
    assert_close(triton, reference, 3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "topk"), [(1, 200), (4, 100), (16, 20), (48, 8)])
def test_kernels_attend_to_short_blocks_as_the_reference_does_with_equal_bits(
    block_size: int, topk: int, device: torch.device
) -> None:
    layer = make_layer("indexer", {"block_size": block_size, "topk": topk}, [700, 0, 1, 1000], model=WIDE)
    triton, again, reference = (
        results(moved(layer, device, torch.bfloat16, backend=backend)) for backend in ("triton", "triton", "reference")
    )
    assert_close(triton, reference, 3e-2)
    assert_close(triton, again, 0)


def peak_bytes(layer: Layer) -> int:
    """Peak memory of a forward and backward pass, with what the layer is made of."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    outputs = run_layer(layer)
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@each
def test_32k_tokens_take_at_most_half_as_much_memory_again_as_full_attention(case: str, device: torch.device) -> None:
    name, options = CASES[case]
    tiny = make_layer(name, options, [1], model=LARGE)
    bytes_of = {}
    for kind, parameters in ((KINDS["full"](KINDS["full"].Options(), 64), None), (tiny.kind, tiny.parameters)):
        shapes = [(2048,), (32, 64), (8, 64), (8, 64)]
        inputs = [torch.randn(32768, *shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        module = None if parameters is None else copy.deepcopy(parameters).to(device, torch.bfloat16)
        layer = tiny.with_inputs(inputs, kind=kind, parameters=module, layout=packed_layout([32768], device))
        bytes_of[kind.name] = peak_bytes(layer)
        del inputs, module, layer
    most = 1.6 if name == "indexer" else 1.5  # 1.54 in two stages
    assert bytes_of[name] <= most * bytes_of["full"]


def distilled(index: list[Tensor], *arguments: Any) -> list[Tensor]:
    """The divergence of `msa` in the operator's arguments, and the gradients of index queries and keys."""
    leaves = [x.detach().requires_grad_() for x in index]
    divergence = index_operators.distill(*leaves, *arguments)
    weights = torch.arange(len(divergence), device=divergence.device).to(divergence.dtype).cos()
    return [divergence.detach(), *torch.autograd.grad(divergence, leaves, weights)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "keys", "head_dim", "block_size"),
    [(8, 2, 1, 64, 128), (9, 3, 3, 64, 64), (4, 1, 1, 128, 128), (8, 2, 2, 64, 400)],
)
@torch.no_grad()
def test_index_branches_of_msa_equal_float64(
    heads: int, kv_heads: int, keys: int, head_dim: int, block_size: int, device: torch.device
) -> None:
    """The selection, the divergence and its gradients from bfloat16 inputs, the same bits in every call."""
    layout = packed_layout([1500, 0, 1, 2300], device)
    where = layout_arguments(layout)
    q, k, v = (x.detach() for x in make_qkv(layout.total, heads, kv_heads, head_dim, device, torch.bfloat16))
    q_index, k_index, _ = make_qkv(layout.total, kv_heads, keys, head_dim, device, torch.bfloat16, seed=1)
    index = [q_index.detach(), k_index.detach().flatten(1)]
    exact = [x.double() for x in index]
    selected, selected_exactly = (
        index_operators.select(*tensors, None, *where, block_size, 3, False, reference)
        for tensors, reference in ((index, False), (exact, True))
    )
    assert (selected != selected_exactly).float().mean() < 1e-3
    _, lse = LOCAL_ENGINE(q, k, v, FullAttention(FullAttention.Options(), head_dim), layout)
    sizes = block_size, head_dim**-0.5, False
    with torch.enable_grad():
        for blocks, every in ((None, 1), (selected, 1), (None, 8), (selected, 8)):
            arguments = q, k, lse, blocks, *where, *sizes, False, every
            got, again = distilled(index, *arguments), distilled(index, *arguments)
            want = distilled(exact, q.double(), k.double(), lse.double(), blocks, *where, *sizes, True, every)
            assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
            for name, one, other, limit in zip("kl dq dk".split(), got, want, (1e-3, 1e-2, 1e-2), strict=True):  # noqa: SIM905
                assert error(one, other) < limit, name


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 64), (128, 100)])
@torch.no_grad()
def test_the_map_that_seer_learns_equals_float64(head_dim: int, block_size: int, device: torch.device) -> None:
    """The kernel's largest probabilities between two blocks, from bfloat16 inputs."""
    layout = packed_layout([1500, 0, 1, 2300], device)
    q, k, v = (x.detach() for x in make_qkv(layout.total, 8, 2, head_dim, device, torch.bfloat16))
    _, lse = LOCAL_ENGINE(q, k, v, FullAttention(FullAttention.Options(), head_dim), layout)
    arguments = *layout_arguments(layout), block_size, head_dim**-0.5
    for every in (1, 3):
        got, *_ = seer_operators.attention_map(q, k, lse, *arguments, False, every)
        want, *_ = seer_operators.attention_map(q.double(), k.double(), lse.double(), *arguments, True, every)
        assert (want > 0).any()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0)


def milliseconds(layer: Layer) -> float:
    """The time of the fastest of three forward and backward passes, after a first one."""
    times = []
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        outputs = run_layer(layer)
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times[1:])


@pytest.mark.gpu
@each
def test_a_learning_gate_takes_at_most_six_times_as_long_as_full_attention(case: str, device: torch.device) -> None:
    """32 query heads, 8 key/value heads of 64, 32K tokens, forward and backward; at 8K, where launches count, twelve
    times. In plain PyTorch, `msa` takes 66 times as long. An indexer's scores are plain PyTorch: three times as
    long (12.3 times full attention's time in two stages at 32K)."""
    wide = WIDE.model_copy(update={"hidden_size": 2048, "heads": 32, "kv_heads": 8})
    tiny = make_layer(*CASES[case], [1], model=wide)
    for tokens in (8192, 32768):
        times = {}
        for kind, parameters in ((KINDS["full"](KINDS["full"].Options(), 64), None), (tiny.kind, tiny.parameters)):
            shapes = [(2048,), (32, 64), (8, 64), (8, 64)]
            inputs = [
                torch.randn(tokens, *shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes
            ]
            module = None if parameters is None else copy.deepcopy(parameters).to(device, torch.bfloat16)
            layer = tiny.with_inputs(inputs, kind=kind, parameters=module, layout=packed_layout([tokens], device))
            times[kind.name] = milliseconds(layer)
            del layer
            del inputs, module
        print(f"{case}, {tokens} tokens: {times[tiny.kind.name]:.1f} ms; full attention: {times['full']:.1f} ms")
        most = (6 if tokens > 8192 else 12) * (3 if tiny.kind.name == "indexer" else 1)
        assert times[tiny.kind.name] <= most * times["full"]
