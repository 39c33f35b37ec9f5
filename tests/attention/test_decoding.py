"""Decoding one token against cached keys gives the last row of attention to the complete sequences."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.layout import TokenRange, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.protocol import LocalAttention

LENGTHS = [451, 1, 128, 700]


def attention_of(kind: str, head_dim: int, backend: str = "auto") -> FullAttention | MobaAttention:
    if kind == "full":
        return FullAttention(FullAttention.Options(backend=backend), head_dim)
    select = kind.removeprefix("moba-")
    options = MobaAttention.Options(block_size=64, topk=3, select=select, always=("first",), backend=backend)
    return MobaAttention(options, head_dim)


def random_cache(lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> CachedKeys:
    """Sequences with 13 unused rows around each."""
    generator = torch.Generator().manual_seed(len(lengths))
    starts = [13 * (index + 1) + sum(lengths[:index]) for index in range(len(lengths))]
    shape = (starts[-1] + lengths[-1] + 13, kv_heads, head_dim)
    k_RKD, v_RKD = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(2))
    ranges = tuple(TokenRange(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return CachedKeys(k_RKD, v_RKD, ranges, last_tokens(lengths, torch.device(device)), None)


def summarized(cached: CachedKeys, attention: LocalAttention, lengths: list[int]) -> CachedKeys:
    keys = cached.packed_keys()
    return replace(cached, summaries=attention.summarize(keys, packed_layout(lengths, keys.device)))


def last_rows(q_BHD: Tensor, cached: CachedKeys, attention: LocalAttention, lengths: list[int]) -> Tensor:
    """Attention of every token of the sequences, of which only the last rows are kept; the other queries are random."""
    layout = packed_layout(lengths, q_BHD.device)
    k_SKD, v_SKD = cached.packed_keys(), cached.packed_values()
    q_SHD = torch.randn(k_SKD.shape[0], *q_BHD.shape[1:], dtype=torch.float64).to(q_BHD)
    rows = layout.cu_seqlens[1:].long() - 1
    q_SHD[rows] = q_BHD
    selection = attention.select(q_SHD, attention.summarize(k_SKD, layout), layout)
    return attention.attend(q_SHD, k_SKD, v_SKD, layout, selection)[0][rows]


@pytest.mark.parametrize("kind", ["full", "moba-head", "moba-group"])
@pytest.mark.parametrize("lengths", [[451], LENGTHS])
def test_it_is_the_last_row_of_the_complete_sequence(kind: str, lengths: list[int]) -> None:
    attention = attention_of(kind, 16)
    cached = summarized(random_cache(lengths, 2, 16, torch.float64, "cpu"), attention, lengths)
    q_BHD = torch.randn(len(lengths), 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out_BHD, lse_HB = attention.decode(q_BHD, cached)
    assert lse_HB.shape == (4, len(lengths))
    torch.testing.assert_close(out_BHD, last_rows(q_BHD, cached, attention, lengths), rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["full", "moba-head", "moba-group"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 128), (32, 1, 128), (9, 3, 64)])
@pytest.mark.parametrize("lengths", [[1], [40_003], LENGTHS])
def test_the_kernel_equals_the_reference(
    kind: str, heads: int, kv_heads: int, head_dim: int, lengths: list[int]
) -> None:
    ours = attention_of(kind, head_dim)
    cached = summarized(random_cache(lengths, kv_heads, head_dim, torch.bfloat16, "cuda"), ours, lengths)
    q_BHD = torch.randn(len(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16)
    got, lse = ours.decode(q_BHD, cached)
    exact = replace(cached, k_RKD=cached.k_RKD.double(), v_RKD=cached.v_RKD.double())
    exact = replace(exact, summaries=None if cached.summaries is None else cached.summaries.double())
    want, want_lse = attention_of(kind, head_dim, "reference").decode(q_BHD.double(), exact)
    assert (got.double() - want).abs().max() < 1e-2 * want.abs().max()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-2)
