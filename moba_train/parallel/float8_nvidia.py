"""Linear layers in FP8 by NVIDIA's Transformer Engine, for `precision.implementation: transformer_engine`.

Its recipe is current scaling: one scale for a tensor, found from the tensor of the same step, e4m3 forward and e5m2 for
gradients, as torchao's tensorwise scaling has it. There is no state to save. Weights stay plain tensors, which FSDP
gathers in the compute dtype.
"""

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moba_train.environment import import_problem

_MULTIPLE = 16
"""Rows of an input must be divisible by it: the gradient of a weight is a product over rows."""


def problem() -> str:
    """Reason why Transformer Engine cannot be used here; empty if it can."""
    reason = import_problem([("transformer_engine.pytorch", "Linear")])
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]', see docs/packages.md"
    return f"transformer_engine.pytorch cannot be used: {reason} ({install})" if reason else ""


def replace_linears(model: nn.Module, names: list[str]) -> None:
    """Replace each of these linear layers by a layer of Transformer Engine with the same parameters."""
    kind = _linear_class()
    for name in names:
        parent, _, child = name.rpartition(".")
        old = model.get_submodule(name)
        assert isinstance(old, nn.Linear)
        has_bias = old.bias is not None
        weight = old.weight
        device = weight.device.type  # as text: only so does it know "meta", where it allocates nothing
        new = kind(old.in_features, old.out_features, bias=has_bias, params_dtype=weight.dtype, device=device)
        new.weight = weight
        if has_bias:
            new.bias = old.bias
        setattr(model.get_submodule(parent), child, new)


@functools.cache
def _linear_class() -> Any:
    """The layer's class, made when it is first asked for: to import Transformer Engine takes seconds."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe = Float8CurrentScaling()

    class Float8Linear(te.Linear):
        """Pads the rows, and has no state other than its parameters."""

        get_extra_state = nn.Module.get_extra_state  # state of delayed scaling, which a checkpoint would contain
        set_extra_state = nn.Module.set_extra_state

        def forward(self, x: Tensor) -> Tensor:
            rows = x.shape[0]
            # Rows of zeros add nothing to the weight's gradient, nor to a tensor's largest magnitude.
            padded = F.pad(x, (0, 0, 0, -rows % _MULTIPLE)) if rows % _MULTIPLE else x
            with te.autocast(enabled=True, recipe=recipe):
                out: Tensor = super().forward(padded)
            return out[:rows]

    return Float8Linear
