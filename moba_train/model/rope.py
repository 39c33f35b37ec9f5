"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split as in Llama.

Positions are arguments, never row numbers: packed documents, context parallelism and decoding need that.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moba_train.config.model import LayerRope


def rope_frequencies(config: LayerRope, head_dim: int, device: torch.device | str | None = None) -> Tensor:
    """Angle per position step, float64 [r / 2], of the r dimensions of a head that turn."""
    if config.fraction < 1:
        head_dim = int(head_dim * config.fraction)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = config.theta**-exponents
    if config.kind == "pi":
        return frequencies / config.factor
    if config.kind == "yarn":
        return _interpolate(frequencies, config.factor, _yarn_ramp(config, head_dim, device))
    if config.kind == "llama3":
        return _interpolate(frequencies, config.factor, _llama3_ramp(config, frequencies))
    if config.kind == "longrope":
        assert config.original_seq_len is not None
        is_short = config.seq_len is not None and config.seq_len <= config.original_seq_len
        factors = config.short_factors if is_short else config.long_factors
        return frequencies / torch.tensor(factors, dtype=torch.float64, device=device)
    return frequencies * (config.kind != "nope")


def longrope_problems(config: LayerRope, head_dim: int) -> Iterator[str]:
    """Lists of longrope that have not one factor for each frequency."""
    count = int(head_dim * config.fraction) // 2
    for key, factors in (("short_factors", config.short_factors), ("long_factors", config.long_factors)):
        if config.kind == "longrope" and len(factors) != count:
            yield f"{key}: given {len(factors)} numbers; allowed: {count}, one for each frequency of a head"


def attention_factor(config: LayerRope) -> float:
    """Factor on rotated queries and keys: YaRN's sqrt(1/t) = 0.1 ln(factor) + 1 (Peng et al. 2023, equation 15),
    LongRoPE's sqrt(1 + ln(factor) / ln(trained length)), 1 for all other embeddings."""
    if config.kind == "longrope":
        assert config.original_seq_len is not None
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_seq_len))
    return 0.1 * math.log(config.factor) + 1 if config.kind == "yarn" else 1.0


def _interpolate(frequencies: Tensor, factor: float, ramp: Tensor) -> Tensor:
    """Blend of each frequency (`ramp` 0) and the frequency divided by `factor` (`ramp` 1)."""
    return frequencies * (1 - ramp) + frequencies / factor * ramp


def _llama3_ramp(config: LayerRope, frequencies: Tensor) -> Tensor:
    """Ramp of `_interpolate`, float64 [head_dim / 2], by the turns of each frequency in the trained length, as in
    Llama 3.1's code."""
    assert config.original_seq_len is not None
    turns = config.original_seq_len * frequencies / (2 * math.pi)
    return ((config.fast_turns - turns) / (config.fast_turns - config.beta_slow)).clamp(0, 1)


def _yarn_ramp(config: LayerRope, head_dim: int, device: torch.device | str | None) -> Tensor:
    """Ramp of `_interpolate`, float64 [head_dim / 2]: 0 for fast frequencies, 1 for slow ones.

    Follows the authors' code and transformers, which round the ends of the ramp to integer indices, unless told not to,
    and let it grow with the frequency's index. The ramp of the paper (equation 13) grows with the number of turns; the
    published models do not use it.
    """
    trained = config.original_seq_len
    assert trained is not None

    def index(turns: float) -> float:
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    fast = index(config.fast_turns)
    slow = index(config.beta_slow)
    low = max(math.floor(fast) if config.truncate else fast, 0)
    high = min(math.ceil(slow) if config.truncate else slow, head_dim - 1)
    indices = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    return ((indices - low) / max(high - low, 1e-3)).clamp(0, 1)


def rope_cos_sin(positions_T: Tensor, config: LayerRope, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles times the attention factor, each float32 [T, 1, r / 2].

    The angle is formed in float64: at position 10**6 a float32 product is off by up to 0.06 radians.
    """
    angles = positions_T.double()[:, None] * rope_frequencies(config, head_dim, positions_T.device)
    scale = attention_factor(config)
    return (scale * angles.cos()).float().unsqueeze(1), (scale * angles.sin()).float().unsqueeze(1)


def apply_rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 c dimensions of each head of `x`, with cos and sin [T, 1, c]; computed in float32 at least,
    returned in x's dtype."""
    width = 2 * cos.shape[-1]
    if width < x_THD.shape[-1]:
        return torch.cat((apply_rope(x_THD[..., :width], cos, sin), x_THD[..., width:]), dim=-1)
    # cos and sin that are rounded to bf16 would be off by up to a part in 512.
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    first, second = x_THD.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)
