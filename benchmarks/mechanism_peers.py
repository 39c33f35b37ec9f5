"""Implementations by others of kinds of attention that are ours too: fla's NSA and flash-msa, where they are installed.

Both begin, as our rows do, with a layer's queries, keys and values. What they lack is named at their calls.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moba_train.config.model import ModelConfig

MSA_BLOCK = 128
"""Keys of a block in flash-msa, as in the kind `msa`."""
Shapes = dict[str, tuple[int, ...]]
"""Shapes of a function's inputs, by parameter."""


def _fla_nsa(**inputs: Tensor) -> Tensor:
    """Mean keys of 64 instead of an MLP over 32, no projections of its own, and no window without flash-attn 2."""
    parallel: Any = importlib.import_module("fla.ops.nsa.parallel")
    window = 512 if getattr(parallel, "flash_attn_func", None) is not None else 0
    out: Tensor = parallel.parallel_nsa(**inputs, block_counts=16, block_size=64, window_size=window)
    return out


def _flash_msa(**inputs: Tensor) -> Tensor:
    """16 blocks, those of `msa`, without its projections; the loss of the index is added to the output's."""
    function = importlib.import_module("flash_msa").flash_msa_func
    out, divergence = function(**inputs, top_k=16 * MSA_BLOCK, scale=inputs["q"].shape[-1] ** -0.5)
    added: Tensor = out + divergence
    return added


def _nsa_inputs(model: ModelConfig, tokens: int) -> Shapes:
    heads, kv_heads, width = model.heads, model.kv_heads, model.head_width
    qkv = {"q": (1, tokens, heads, width), "k": (1, tokens, kv_heads, width), "v": (1, tokens, kv_heads, width)}
    return qkv | {f"g_{branch}": (1, tokens, heads) for branch in ("cmp", "slc", "swa")}


def _msa_inputs(model: ModelConfig, tokens: int) -> Shapes:
    counts = {"q_proxy": model.kv_heads, "k_proxy": 1, "q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    return {name: (1, count, tokens, model.head_width) for name, count in counts.items()}


PEERS: dict[str, tuple[Callable[..., Tensor], Callable[[ModelConfig, int], Shapes]]] = {
    "fla-nsa": (_fla_nsa, _nsa_inputs),
    "flash-msa": (_flash_msa, _msa_inputs),
}
"""The output from inputs, and these. fla's NSA needs at least 16 query heads for each key/value head, flash-msa heads
of 128 channels."""


def peer_calls(
    name: str, model: ModelConfig, tokens: int, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Any]]:
    """Forward alone, and forward and backward to all inputs, on random ones in bf16."""
    call, inputs = PEERS[name]
    generator = torch.Generator(device).manual_seed(0)
    leaves = {
        key: torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
        for key, shape in inputs(model, tokens).items()
    }

    def forward() -> Tensor:
        with torch.no_grad():
            return call(**leaves)

    def both() -> Any:
        out = call(**leaves)
        return torch.autograd.grad(out, [*leaves.values()], torch.ones_like(out), allow_unused=True)

    return forward, both
