"""`moba_attention` against the specification written down a second time (oracle.py)."""

from typing import Any

import torch

from moba_train.attention.moba import moba_attention
from tests.attention.helpers import assert_all_close, both, edges, make_qkv, run
from tests.attention.oracle import moba as oracle_moba


def assert_equals_oracle(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device | str,
    seed: int = 0,
    backend: str = "reference",
    **options: Any,
) -> None:
    """out, lse and all gradients, in float64."""
    qkv = make_qkv(sum(lengths), heads, kv_heads, head_dim, seed=seed)
    want = run(lambda q, k, v: oracle_moba(q, k, v, lengths, **options), qkv)
    if (scale := options.pop("scale", None)) is not None:
        options["softmax_scale"] = scale
    options |= {"cu_seqlens": edges(lengths, device), "return_lse": True, "backend": backend}
    got = run(lambda q, k, v: both(moba_attention(q, k, v, **options)), tuple(x.to(device) for x in qkv))
    assert_all_close(got, want)
