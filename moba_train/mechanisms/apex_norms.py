"""RMS norms by NVIDIA apex: an implementation for `norm_implementation`."""

import torch
from torch import Tensor, nn

from moba_train.environment import import_problem


class ApexRMSNorm(nn.RMSNorm):
    """torch's RMSNorm, its weight included, computed by apex's kernel: one operator, which torch.compile leaves as it
    is. Input and weight have one dtype, float32 or a 16-bit one; the sum of squares is float32."""

    @staticmethod
    def problem(device: str) -> str:
        """Reason why it cannot run on `device`, "cuda" or "cpu"; empty if it can."""
        if device != "cuda":
            return f"the run trains on {device}, a GPU needed"
        module = "apex.normalization.fused_layer_norm"
        reason = import_problem((("fused_layer_norm_cuda", "__name__"), (module, "fused_rms_norm_affine")))
        install = "build NVIDIA apex from its source with its CUDA extensions, see docs/how-to/optional-packages.md"
        return f"apex.normalization cannot be used: {reason} ({install})" if reason else ""

    def forward(self, x: Tensor) -> Tensor:
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        epsilon = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # as torch, also in 16 bits
        out: Tensor = fused_rms_norm_affine(x, self.weight, list(self.normalized_shape), epsilon)
        return out
