"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split as in Llama.

Positions are always given, never guessed from a row number: packed documents, context parallelism and decoding need it.
"""

import torch
from torch import Tensor

from moba_train.config.model import RopeConfig


def rope_frequencies(config: RopeConfig, head_dim: int, device: torch.device | str | None = None) -> Tensor:
    """Angle per position step, float64 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    frequencies = config.theta**-exponents
    return frequencies / config.factor if config.kind == "pi" else frequencies


def rope_cos_sin(positions_T: Tensor, config: RopeConfig, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation angles, each float32 [T, 1, head_dim / 2].

    The angle is formed in float64: at position 10**6 a float32 product is off by up to 0.06 radians.
    """
    angles = positions_T.double()[:, None] * rope_frequencies(config, head_dim, positions_T.device)
    return angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)


def apply_rope(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each head of `x`; computed in float32 at least, returned in x's dtype."""
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    first, second = x_THD.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)
