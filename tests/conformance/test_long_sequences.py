"""Sizes at which kernels and losses were reported to fail: many blocks, many tokens, large vocabularies."""

from typing import Any

import pytest
import torch

from benchmarks.loss_memory import logits_bytes, measure
from moba_train.attention.moba.function import moba_attention
from moba_train.model.loss import chunk_tokens

TOPK = 3


@pytest.mark.parametrize(
    ("blocks", "size", "backend"),
    [
        (138, 16, "auto"),
        pytest.param(65_546, 16, "auto", marks=pytest.mark.gpu),
        pytest.param(65_546, 64, "triton", marks=pytest.mark.gpu),
    ],
)
def test_blocks_beyond_the_limit_of_a_grid_are_selected_and_attended_to(
    blocks: int, size: int, backend: Any, device: torch.device
) -> None:
    """mamba#1015: results beyond 61K tokens are wrong because a grid dimension ends at 65,535. On a GPU, more blocks
    than that; the last rows are compared with their definition, a second document with itself alone."""
    tokens = blocks * size
    half = device.type == "cuda"
    dtype = torch.bfloat16 if half else torch.float32
    heads = 2
    width = 64
    other = 300
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(tokens + other, count, width, dtype=dtype, device=device, generator=generator)
        for count in (heads, 1, 1)
    )
    options: dict[str, Any] = {"block_size": size, "topk": TOPK, "backend": backend}
    edges = torch.tensor([0, tokens, tokens + other], dtype=torch.int32, device=device)
    out = moba_attention(q, k, v, **options, cu_seqlens=edges)
    assert isinstance(out, torch.Tensor)
    alone = moba_attention(*(x[tokens:].contiguous() for x in (q, k, v)), **options)
    assert isinstance(alone, torch.Tensor)
    torch.testing.assert_close(out[tokens:], alone, rtol=0, atol=1e-2 if half else 1e-5)

    means_ND = k[:tokens, 0].float().view(blocks, size, width).mean(1).to(dtype).float()
    compared = 0
    for row in range(tokens - 64, tokens):
        own = row // size
        for head in range(heads):
            query_D = q[row, head].float()
            scores_N = means_ND[:own] @ query_D
            best = scores_N.topk(TOPK)
            if best.values[TOPK - 2] - best.values[TOPK - 1] < 0.05:  # rounding may choose the other one
                continue
            starts = [*(best.indices[: TOPK - 1] * size).tolist(), own * size]
            seen = torch.cat([torch.arange(start, min(start + size, row + 1), device=device) for start in starts])
            weights = ((k[seen, 0].float() @ query_D) * width**-0.5).softmax(0)
            wanted_D = weights @ v[seen, 0].float()
            torch.testing.assert_close(out[row, head].float(), wanted_D, rtol=0, atol=2e-2 if half else 1e-5)
            compared += 1
    assert compared > 30


def test_the_memory_of_the_loss_does_not_grow_with_tokens_that_carry_none() -> None:
    """slime#2253: logits are made for all tokens of a prompt. With 12 loss tokens, four times the tokens need the
    memory of their hidden states' gradient alone, which is made twice."""
    few, many = (measure(tokens, 12, 2048, 32, torch.device("cpu")) for tokens in (1024, 4096))
    assert many - few <= 2 * 2 * 32 * (4096 - 1024) * 1.05
    assert many < logits_bytes(4096, 2048) / 20


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.003, 1.0])
def test_the_loss_of_128k_tokens_fits_with_a_vocabulary_of_248k(share: float) -> None:
    """Automodel#3907: full logits, 121 GiB in float32, run out of memory."""
    tokens = 131_072
    vocab = 248_320
    width = 2048
    peak = measure(tokens, round(share * tokens), vocab, width, torch.device("cuda"))
    given = 2 * width * (tokens + vocab)
    print(f"peak {peak / 2**30:.1f} GiB")
    assert peak < logits_bytes(min(chunk_tokens(vocab), round(share * tokens)), vocab) + 4 * given
