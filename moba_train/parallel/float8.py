"""The linear layers of the blocks in FP8, by torchao's float8 training or by Transformer Engine.

Master weights, gradients, norms, embeddings, the output projection and attention stay as they are: the three matrix
products of a linear layer are computed in FP8 (e4m3 for inputs and weights, e5m2 for gradients under tensorwise
scaling). Scales are functions of the tensors of the same step, so there is no state to save. By torchao, with
tensorwise scaling, FSDP gathers weights in FP8, half the bytes of bf16; their scales take one all-reduce for all
weights (`update_weight_scales`), instead of one for each, and they are cast once a step (float8_weights.py).

Transformer Engine's recipe is current scaling, one scale for a tensor as torchao's tensorwise scaling has it; weights
stay plain tensors, which FSDP gathers in the compute dtype.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.config.precision import PrecisionConfig
from moba_train.environment import import_problem
from moba_train.model.build import build_model
from moba_train.model.spec import ModelSpec, kind_of_parameter
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import unwrapped
from moba_train.torch_private import inductor_config, local_tensor

_LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 matrix products."""
_MULTIPLE = 16
"""Both sizes of a matrix must be divisible by it for the kernels of the GPU, and for Transformer Engine the rows of an
input, over which the gradient of a weight is a product."""


def float8_problem(precision: PrecisionConfig, device: str | None) -> str:
    """Reason why `precision.linear: fp8` cannot run on `device` ("cuda", "cpu"; None: not known); empty if it can."""
    if device is None:
        return ""
    by_torchao = precision.implementation == "torchao"
    if by_torchao and find_spec("torchao") is None:
        return "the package torchao is not installed (pip install 'torchao>=0.18')"
    if by_torchao and precision.fp8.emulate:
        return ""
    if device != "cuda":
        emulation = "; precision.fp8.emulate: true rounds as FP8 does, slowly" if by_torchao else ""
        return f"the run trains on {device}, a GPU needed{emulation}"
    if torch.cuda.is_available() and (
        reason := gpu_problem(precision, torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    ):
        return reason
    return "" if by_torchao else _engine_problem()


def gpu_problem(precision: PrecisionConfig, name: str, capability: tuple[int, int]) -> str:
    """Reason why `precision.linear: fp8` cannot run on a GPU of this name and compute capability, on any machine; empty
    if it can."""
    if capability >= _LEAST_CAPABILITY or precision.fp8.emulate:
        return ""
    given, least = (".".join(map(str, numbers)) for numbers in (capability, _LEAST_CAPABILITY))
    return f"{name} has compute capability {given}, at least {least} needed"


def exclude_problems(spec: ModelSpec, precision: PrecisionConfig) -> Iterator[str]:
    """Patterns in `precision.fp8.exclude` that match no layer of the model."""
    exclude = precision.fp8.exclude
    if precision.linear != "fp8" or not exclude:
        return
    with torch.device("meta"):
        names = float8_layers(build_model(spec))
    inside = ", ".join(dict.fromkeys(name.split(".", 2)[2] for name in names))
    allowed = f"names or patterns of blocks.N.LAYER, N from 0 to {spec.config.layers - 1}, LAYER one of {inside}"
    for place, pattern in enumerate(exclude):
        if not any(fnmatchcase(name, pattern) for name in names):
            yield (
                f"precision.fp8.exclude[{place}]: given {pattern!r}, which matches no linear layer that can compute in "
                f"FP8; allowed: {allowed if names else 'none, as no layer has sizes that are multiples of 16'}"
            )


def describe_layers(spec: ModelSpec, precision: PrecisionConfig) -> str:
    """Number of linear layers of the blocks that compute in FP8, and their scaling, for the beginning of a run."""
    with torch.device("meta"):
        model = build_model(spec)
    count = f"{len(float8_layers(model, precision.fp8.exclude))} of {len(_block_linears(model))}"
    emulated = ", emulated" if precision.fp8.emulate else ""
    return f"{count} linear layers of the blocks, by {precision.implementation}, {precision.fp8.scaling}{emulated}"


def float8_layers(model: Transformer, exclude: Sequence[str] = ()) -> list[str]:
    """Names of the linear layers of the blocks that compute in FP8.

    Left out: the parameters of attention kinds, layers that match `exclude`, and matrices whose sizes are not multiples
    of 16.
    """
    return [
        name
        for name, linear in _block_linears(model).items()
        if linear.in_features % _MULTIPLE == 0
        and linear.out_features % _MULTIPLE == 0
        and not kind_of_parameter(f"{name}.weight")
        and not any(fnmatchcase(name, pattern) for pattern in exclude)
    ]


def _block_linears(model: Transformer) -> dict[str, nn.Linear]:
    modules = model.named_modules()
    return {name: one for name, one in modules if isinstance(one, nn.Linear) and name.startswith("blocks.")}


def convert_linears(model: Transformer, precision: PrecisionConfig) -> list[str]:
    """Make the `float8_layers` of the model compute in FP8, in place; returns their names.

    Call it before the model is sharded; names of parameters do not change.
    """
    names = float8_layers(model, precision.fp8.exclude)
    if precision.implementation == "transformer_engine":
        _replace_linears(model, names)
        return names
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    options = replace(
        Float8LinearConfig.from_recipe_name(precision.fp8.scaling),
        emulate=precision.fp8.emulate,
        # torchao gathers in FP8 with one scale a tensor alone.
        enable_fsdp_float8_all_gather=precision.fp8.scaling == "tensorwise",
        pad_inner_dim=True,  # the gradient of a weight sums over tokens, of which a rank may have any number
    )
    convert_to_float8_training(model, config=options, module_filter_fn=lambda _, name: name in names)
    return names


def _engine_problem() -> str:
    """Reason why Transformer Engine cannot be used here; empty if it can."""
    reason = import_problem([("transformer_engine.pytorch", "Linear")])
    install = "pip install --no-build-isolation 'transformer-engine[pytorch]', see docs/how-to/optional-packages.md"
    return f"transformer_engine.pytorch cannot be used: {reason} ({install})" if reason else ""


def _replace_linears(model: nn.Module, names: list[str]) -> None:
    """Replace each of these linear layers by a layer of Transformer Engine with the same parameters."""
    kind = _engine_linear()
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
def _engine_linear() -> Any:
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


def compile_for_float8(precision: PrecisionConfig) -> None:
    """Settle how torch.compile treats layers in FP8, from now on: weights are cast in one compiled pass, and a norm's
    two gradients are not computed in one kernel.

    That kernel would also write the norm's output, cast and transposed for the gradient of the next weight. It takes
    a row at a time, so each byte of a column is a write of its own: 1.9 ms for 8K rows of 4096, where a kernel of one
    reduction, whose tiles torch chooses by measuring, takes 0.2 (benchmarks/results/
    training-profile-8b-fp8-h200-x2.json).
    """
    # Only with FP8: in bf16 the one kernel saves a pass. With this, a step of the 8B at 8K took 672 ms on two H200
    # (benchmarks/results/training-8b-8k-copy-engines-h200-x2.json).
    inductor_config().triton.mix_order_reduction = False
    if precision.implementation == "torchao":
        from moba_train.parallel import float8_weights

        float8_weights.compile_cast()


def update_weight_scales(model: nn.Module) -> None:
    """Compute the scales of all weights that are gathered in FP8, with one all-reduce; their next gather casts them.

    Called before every use of the model with new weights, on all ranks together: nothing tells reliably whether a
    weight has changed, as the versions of these tensors do not count the optimizer's steps.
    """
    weights = [weight for parameter in model.parameters() if (weight := _wrapper(parameter)) is not None]
    if weights:
        from moba_train.parallel import float8_weights

        float8_weights.begin(model, weights)


def plain(tensor: Tensor) -> Tensor:
    """A weight that is gathered in FP8 without torchao's wrapper, sharing its memory; other tensors as they are."""
    if isinstance(tensor, DTensor):
        if (wrapper := _wrapper(tensor)) is None:
            return tensor
        return DTensor.from_local(
            wrapper._tensor, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
    return unwrapped(tensor)


def _wrapper(parameter: Tensor) -> Any:
    """torchao's wrapper of this rank's part of a weight that is gathered in FP8; None for other tensors."""
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else None
    return local if isinstance(getattr(local, "_tensor", None), Tensor) else None
