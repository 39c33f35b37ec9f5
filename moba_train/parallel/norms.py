"""RMS norms by NVIDIA apex's fused kernel, in the place of torch's."""

import torch
from torch import Tensor, nn

from moba_train.optional_imports import import_problem


def norm_problem(implementation: str, device: str | None) -> str:
    """Why `norm_implementation` cannot run on `device` ("cuda", "cpu"; None: not known); empty when it can."""
    if implementation == "torch" or device is None:
        return ""
    if device != "cuda":
        return f"the run trains on {device}, a GPU needed"
    kernels = ("fused_layer_norm_cuda", "__name__"), ("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    reason = import_problem(kernels)
    install = "build NVIDIA apex from its source with its CUDA extensions, see docs/packages.md"
    return f"apex.normalization cannot be used: {reason} ({install})" if reason else ""


class ApexRMSNorm(nn.RMSNorm):
    """torch's RMSNorm, its weight included, computed by apex's kernel: one operator, which torch.compile leaves as it
    is. Input and weight have one dtype, float32 or a 16-bit one; the sum of squares is float32."""

    def forward(self, x: Tensor) -> Tensor:
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        epsilon = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # as torch, also in 16 bits
        out: Tensor = fused_rms_norm_affine(x, self.weight, list(self.normalized_shape), epsilon)
        return out


def use_apex_norms(model: nn.Module) -> None:
    """Compute all RMS norms of `model` by apex, in place. Parameters stay the same ones, under the same names."""
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = ApexRMSNorm
