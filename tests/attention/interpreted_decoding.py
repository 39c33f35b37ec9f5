"""Decoding in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from moba_train.attention.kernels.common.cached_keys import CachedKeys, last_tokens
from moba_train.attention.kernels.triton import decode
from moba_train.attention.layout import TokenRange, packed_layout
from tests.attention.kernel_checks import build, error
from tests.attention.quick_interpreter import quicken

quicken()


@pytest.mark.parametrize("select", ["head", "group"])
@pytest.mark.parametrize("block_size", [64, 80])
def test_decoding_equals_the_reference(select: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of other lengths, one shorter than its selection, between unused rows of the cache."""
    monkeypatch.setattr(decode, "_parts", lambda *_sizes: 3)
    lengths, starts, heads, kv_heads, head_dim = [451, 100], [7, 600], 4, 2, 64
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, heads, head_dim, generator=generator)
    k, v = (torch.randn(720, kv_heads, head_dim, generator=generator) for _ in range(2))
    ranges = tuple(TokenRange(start, start + length) for start, length in zip(starts, lengths, strict=True))
    options = {"block_size": block_size, "topk": 3, "select": select, "always": ("first",)}
    layout = last_tokens(lengths, torch.device("cpu"))
    moba = build("reference", head_dim, **options)
    cached = CachedKeys(k, v, ranges, layout, None)
    cached = replace(cached, summaries=moba.summarize(cached.packed_keys(), packed_layout(lengths)))
    (selected,) = moba.select(q, cached.summaries, layout)
    relative = torch.where(selected < 0, -1, selected - torch.tensor([0, -(-451 // block_size)])[:, None]).int()
    relative = relative[:: heads // kv_heads] if select == "group" else relative
    for name, got, want in (
        (
            "listed",
            decode.decode(q, cached, scale=moba.scale, block_size=block_size, selected_HBC=relative),
            moba.decode(q, cached),
        ),
        ("all", decode.decode(q, cached, scale=moba.scale), moba.full.decode(q, cached)),
    ):
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 2e-6, name
