"""The models of the figures, by size, and the recipe that their arms have in common.

Sizes count parameters outside embedding and output projection. Heads are 64 wide, two query heads share keys and
values, the feed-forward is about 8/3 of the width.
"""

from collections.abc import Mapping
from typing import Any

TOKENS_PER_PARAMETER = 20
"""Training tokens for each parameter, as in Hoffmann et al. 2022 (arXiv:2203.15556) and MoBA's own scaling runs."""
BATCH_TOKENS = 32_768
PEAK_RATE = 1.5e-3
"""Learning rate at a width of 256."""
SHORT_LENGTH = 1024
SHORT_SHARE = 0.0
"""Share of its tokens that a run begins with, in sequences of `SHORT_LENGTH`; 0: none."""

SIZES: dict[str, dict[str, int]] = {
    "4m": {"hidden_size": 256, "intermediate_size": 704, "layers": 6, "heads": 4, "kv_heads": 2},
    "6m": {"hidden_size": 384, "intermediate_size": 1024, "layers": 4, "heads": 6, "kv_heads": 3},
    "10m": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "kv_heads": 3},
    "15m": {"hidden_size": 512, "intermediate_size": 1408, "layers": 5, "heads": 8, "kv_heads": 4},
    "21m": {"hidden_size": 512, "intermediate_size": 1408, "layers": 7, "heads": 8, "kv_heads": 4},
    "25m": {"hidden_size": 512, "intermediate_size": 1408, "layers": 8, "heads": 8, "kv_heads": 4},
}
QUICK_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 2, "kv_heads": 1},
    "small": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1},
    "large": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2},
}
"""For `--quick`: seconds on a CPU."""


def parameters(size: str) -> int:
    """Parameters of a model of this size, without embedding, output projection and norms."""
    shape = (SIZES | QUICK_SIZES)[size]
    hidden = shape["hidden_size"]
    attention = 2 * hidden * (shape["heads"] + shape["kv_heads"]) * (hidden // shape["heads"])
    return shape["layers"] * (attention + 3 * hidden * shape["intermediate_size"])


def learning_rate(size: str, peak: float = PEAK_RATE) -> float:
    """Peak rate: `peak` at a width of 256, falling with the width's root; the same for all attention kinds."""
    return peak * float((256 / (SIZES | QUICK_SIZES)[size]["hidden_size"]) ** 0.5)


def batch_tokens(seq_len: int) -> int:
    """Tokens of a batch, chosen by experiments/settings.py; at least two sequences, which two GPUs can share."""
    return max(BATCH_TOKENS, 2 * seq_len)


def staged(seq_len: int, tokens: int, short: float = SHORT_SHARE) -> list[dict[str, Any]]:
    """The stages of a run of `tokens` tokens: `short` of them in sequences of `SHORT_LENGTH`, of an eighth of `seq_len`
    where that is less, then the others."""
    before = round(short * tokens)
    first = {"name": "short", "seq_len": min(SHORT_LENGTH, seq_len // 8), "tokens": before}
    return [*([first] if before else []), {"name": "train", "seq_len": seq_len, "tokens": tokens - before}]


def moba(block_size: int, topk: int, **options: Any) -> dict[str, Any]:
    """The section `attention` of a model whose layers are all MoBA; `topk` counts the query's own block."""
    return {"default": "moba", "moba": {"block_size": block_size, "topk": topk, **options}}


FULL: dict[str, Any] = {"default": "full"}
"""The section `attention` of a model whose layers are all full."""


def recipe(
    size: str,
    attention: Mapping[str, Any],
    seq_len: int,
    tokens: int,
    batch: int,
    evaluation: Mapping[str, Any],
    /,
    **other: Any,
) -> dict[str, Any]:
    """A recipe of `tokens` tokens in batches of `batch`, a cosine after a warm-up of 2 %, evaluated at its end. `other`
    keys replace these."""
    shape = (SIZES | QUICK_SIZES)[size]
    return {
        "model": {
            **shape,
            "tie_embeddings": True,
            "rope": {"theta": 500_000.0},
            "init_std": shape["hidden_size"] ** -0.5,
        },
        "attention": dict(attention),
        "batch_tokens": batch,
        "stages": staged(seq_len, tokens),
        "optim": {"lr": learning_rate(size), "schedule": {"kind": "cosine", "warmup_tokens": tokens // 50}},
        "evaluation": {"every": 10**6, **evaluation},
        **other,
    }
