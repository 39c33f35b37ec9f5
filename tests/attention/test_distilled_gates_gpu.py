"""The distilled gates on a GPU: the numbers of the CPU, kernels against the reference, and how much memory they
take."""

import copy
import gc
from typing import Any

import pytest
import torch
from kind_checks import MODEL, Layer, make_layer, results, run_layer

from moba_train.attention.protocol import packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig

CASES = {
    "seer warmup": ("seer", {"mode": "warmup"}),
    "seer sparse": ("seer", {"train_gate": True}),
    "msa warmup": ("msa", {"mode": "warmup"}),
    "msa sparse": ("msa", {}),
}
WIDE = ModelConfig(**(MODEL.model_dump() | {"hidden_size": 512, "heads": 8, "kv_heads": 2, "head_dim": 64}))
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
    return Layer(kind, moved_parameters, *inputs, packed_layout(lengths, device), layer.model)


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
    layer = make_layer(name, {"block_size": 4, "topk": 3} | options, [12, 0, 1, 27, 60])
    assert_close(results(moved(layer, device, torch.float32)), results(layer), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["seer sparse", "msa sparse"])
def test_kernels_attend_to_the_selected_blocks_as_the_reference_does(case: str, device: torch.device) -> None:
    name, options = CASES[case]
    layer = make_layer(name, {"block_size": 64, "topk": 4} | options, [700, 0, 1, 1000], model=WIDE)
    triton, reference = (
        results(moved(layer, device, torch.bfloat16, backend=backend)) for backend in ("triton", "reference")
    )
    assert_close(triton, reference, 3e-2)


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
    tiny = make_layer(name, options, [1], model=WIDE)
    bytes_of = {}
    for kind, parameters in ((KINDS["full"](KINDS["full"].Options(), 64), None), (tiny.kind, tiny.parameters)):
        shapes = [(512,), (8, 64), (2, 64), (2, 64)]
        inputs = [torch.randn(32768, *shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        module = None if parameters is None else copy.deepcopy(parameters).to(device, torch.bfloat16)
        layer = Layer(kind, module, *inputs, packed_layout([32768], device), WIDE)
        bytes_of[kind.name] = peak_bytes(layer)
        del inputs, module, layer
    assert bytes_of[name] <= 1.5 * bytes_of["full"]
