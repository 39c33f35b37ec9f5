"""Weights that FSDP gathers in FP8 by torchao, cast once for all gathers of a step.

torchao casts a rank's part of a weight, three passes over float32 numbers, for each gather: for the forward pass, for
the backward pass, and so for every micro-batch. Here the cast stays until the next scales, one byte for each of the
rank's numbers, and one pass if it is compiled. Needs torchao.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Float8Weight


class CastOnce(Float8Weight):
    """A rank's part of a weight. FSDP makes these parts as torchao's class, so that they are turned into this one
    later (`begin`)."""

    kept: Any
    """Result of the first gather since the scales were last computed; None: there was no gather since."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        """The cast numbers, and their scale, for a gather over `mesh`."""
        if self.kept is None:
            weight, scale = self._tensor, self._precomputed_scale
            if _cast_in_one_pass is not None and weight.is_cuda and scale is not None:
                flat = weight.reshape(-1)  # one compiled form does for all shapes
                self.kept = (_cast_in_one_pass(flat, scale, self._dtype).view(weight.shape),), (scale,)
            else:
                self.kept = super().fsdp_pre_all_gather(mesh)
        return self.kept


def cast(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` x `scale`, the largest numbers of `dtype` at most, in `dtype`: as torchao casts, bit by bit."""
    most = torch.finfo(dtype).max
    return (weight.to(torch.float32) * scale).clamp(-most, most).to(dtype)


_cast_in_one_pass: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None


def compile_cast() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """Cast weights on GPUs by a compiled `cast` from now on; returns it."""
    global _cast_in_one_pass
    _cast_in_one_pass = _cast_in_one_pass or torch.compile(cast, dynamic=True)
    return _cast_in_one_pass


def begin(model: nn.Module, weights: list[Float8Weight]) -> None:
    """Compute the scales of all weights that are gathered in FP8, with one all-reduce; `weights`: this rank's parts of
    them, whose next gather casts them again. A collective."""
    precompute_float8_dynamic_scale_for_fsdp(model)
    for weight in weights:
        # By their class, as FSDP has made the parts by then and refers to these objects. Casting once a step took 30 ms
        # off a step of the 8B at 8K on two H200; in one compiled pass the casts take 9 ms instead of 45
        # (benchmarks/LOG.md, "FP8").
        weight.__class__ = CastOnce
        weight.kept = None
