"""Which parameters a stage trains: glob patterns on parameter names, such as `blocks.*.attention.*`.

A frozen parameter gets no gradient, and so no optimizer step, no change of its optimizer state and no weight decay.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule


def is_trainable(name: str, patterns: Sequence[str]) -> bool:
    """Whether the parameter `name` matches any of `patterns`; `*` matches any text, dots included."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def set_trainable(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let gradients reach the parameters of `model` whose names match any of `patterns`, and no others.

    For a plain model or one under FSDP2, between steps, on all ranks together.
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        module.reshard()  # an evaluation leaves the outermost one gathered, and the optimizer knows its shards only
    changed = False
    for name, parameter in model.named_parameters():
        trainable = is_trainable(name, patterns)
        changed |= parameter.requires_grad != trainable
        parameter.requires_grad_(trainable)
    if changed:
        # FSDP2 hands the flag of a shard on to the gathered parameter at each gather, but reads the dtypes of gradient
        # reduction off the parameters that were trainable when it initialized itself: a module that was frozen then
        # would reduce in bf16. `unshard` initializes again.
        for module in fsdp_modules:
            module.unshard()
            module.reshard()
