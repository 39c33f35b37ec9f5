"""LoRA and DoRA: small factors beside the weights of linear layers, trained while the weights stay as they are.

LoRA (Hu et al. 2021, arXiv:2106.09685) adds s B A to a weight W [columns out, columns in], with A [r, in], B [out, r]
and s = lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732). B begins at
zero, so that the model begins as its base. DoRA (Liu et al. 2024, arXiv:2402.09353) multiplies each row of the sum by
m / norm, where m, one number for each row, begins at the row's norm in W and is trained; the norm is a constant to the
backward pass (section 4.3 there). The parameter here is the change of m, which is the same to an optimizer: rounded to
bf16, m itself would change a base by up to one part in 512 before anything is trained.

Names of options and parameters are those of `peft`, whose folders tools/convert/adapters.py writes.

Shape suffixes: T packed tokens, I columns in, O columns out, r rank.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moba_train.config.base import Section
from moba_train.errors import CheckpointError
from moba_train.model.adapters import Adapters
from moba_train.model.spec import kind_of_parameter
from moba_train.model.transformer import Transformer
from moba_train.optim.gradients import local_part

CHECKSUM = "adapters_base"
"""Buffer of the model with the checksum of the base, int64 [1]."""
A, B, CHANGE = "lora_A.weight", "lora_B.weight", "lora_magnitude_change"
"""Ends of the names of the parameters."""


class LoraOptions(Section):
    """LoRA adapters, under peft's names. Only they are trained and saved, with `modules_to_save` and the parameters of
    attention kinds; everything else stays what `init_from` holds."""

    r: int = Field(16, ge=1, le=4096, description="rank: columns of the factors")
    lora_alpha: float = Field(32, gt=0, description="the product of the factors is multiplied by lora_alpha / r")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="linear layers of the blocks that get adapters: all, or names such as q_proj and patterns such as "
        "blocks.1*.attention.*",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="share of the adapters' inputs that a step drops")
    use_dora: bool = Field(False, description="also train the norm of each row of the weights (DoRA)")
    use_rslora: bool = Field(False, description="lora_alpha / sqrt(r) instead of lora_alpha / r")
    modules_to_save: list[str] = Field(
        [], description="modules trained in full, by name or pattern, such as embedding and *norm (LongLoRA)"
    )

    @property
    def scaling(self) -> float:
        """Factor of the product of A and B."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class LoraLinear(nn.Linear):
    """A linear layer with adapters. Made of one that is there, which keeps its parameters and their names."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_magnitude_change: nn.Parameter | None
    scaling: float
    dropout: float
    adapts: bool
    """False: computes as the layer without adapters."""

    @staticmethod
    def adapt(linear: nn.Linear, options: LoraOptions) -> None:
        """Give `linear` adapters, in place."""
        linear.__class__ = LoraLinear
        assert isinstance(linear, LoraLinear)
        linear.lora_A = nn.Linear(linear.in_features, options.r, bias=False)
        linear.lora_B = nn.Linear(options.r, linear.out_features, bias=False)
        norms = nn.Parameter(torch.empty(linear.out_features)) if options.use_dora else None
        linear.register_parameter(CHANGE, norms)
        linear.scaling = options.scaling
        linear.dropout = options.lora_dropout
        linear.adapts = True

    def forward(self, x_TI: Tensor) -> Tensor:
        """The layer's output, [T, O]."""
        out_TO = F.linear(x_TI, self.weight, self.bias)
        if not self.adapts:
            return out_TO
        drops = self.dropout > 0 and torch.is_grad_enabled()  # evaluations have no gradients
        dropped_TI = F.dropout(x_TI, self.dropout) if drops else x_TI
        scaled_Tr = self.scaling * self.lora_A(dropped_TI)  # before B: fewer columns to multiply
        if self.lora_magnitude_change is None:
            return torch.addmm(out_TO, scaled_Tr, self.lora_B.weight.mT)  # makes one tensor of T x O less
        added_TO = self.lora_B(scaled_Tr)
        change_O = self.lora_magnitude_change
        before_O, norms_O = row_norms(
            self.weight.detach(), self.lora_A.weight.detach(), self.scaling * self.lora_B.weight.detach()
        )
        more_O = (before_O - norms_O + change_O) / norms_O  # m / norm - 1
        # As peft: what is dropped is dropped of the difference to the base alone.
        plain_TO = F.linear(dropped_TI, self.weight) if drops or self.bias is not None else out_TO
        return out_TO + added_TO + more_O.to(out_TO.dtype) * (plain_TO + added_TO)


def row_norms(weight_OI: Tensor, a_rI: Tensor, b_Or: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of the rows of W and of those of W + B A, [O], in float32 or wider, without a matrix of the size of W. The
    latter are above 0, so that a row of zeros, as in layers that were added to a model, stays one."""
    wide = torch.promote_types(weight_OI.dtype, torch.float32)
    before_O = torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide)
    crossed_Or = (weight_OI @ a_rI.mT).to(wide)
    a_rI = a_rI.to(wide)
    b_Or = b_Or.to(wide)
    added_O = ((2 * crossed_Or + b_Or @ (a_rI @ a_rI.mT)) * b_Or).sum(1)
    return before_O, (before_O.square() + added_O).clamp(min=torch.finfo(wide).tiny).sqrt()


def merged(weight_OI: Tensor, adapters: Mapping[str, Tensor], options: LoraOptions) -> Tensor:
    """The weight that computes what the layer with these adapters does, by the ends of their names, in the dtype of
    `weight_OI`, computed in float64."""
    sum_OI = weight_OI.double() + options.scaling * (adapters[B].double() @ adapters[A].double())
    if options.use_dora:
        magnitude_O = weight_OI.double().norm(dim=1) + adapters[CHANGE].double()
        sum_OI *= (magnitude_O / sum_OI.norm(dim=1).clamp(min=torch.finfo(sum_OI.dtype).tiny))[:, None]
    return sum_OI.to(weight_OI.dtype)


class Lora(Adapters):
    """LoRA adapters of a model."""

    Options = LoraOptions

    def __init__(self, options: LoraOptions, model: Transformer) -> None:
        self._model = model
        before = {name for name, _ in model.named_parameters()}
        linears = linear_layers(model)
        self.targets = [
            name for name in linears if options.target_modules == "all-linear" or _is_any(name, options.target_modules)
        ]
        """Names of the layers with adapters."""
        self.layers: list[LoraLinear] = []
        for name in self.targets:
            LoraLinear.adapt(linears[name], options)
            self.layers.append(linears[name])  # type: ignore[arg-type]  # it is one now
        model.register_buffer(CHECKSUM, torch.zeros(1, dtype=torch.int64))
        self.base = frozenset(
            name
            for name in before
            if not kind_of_parameter(name) and not _is_any(name.rpartition(".")[0], options.modules_to_save)
        )
        self.added = frozenset({name for name, _ in model.named_parameters()} - before | {CHECKSUM})
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.base)
        self._found = 0
        """Checksum of the base that the model has."""

    @classmethod
    def problems(cls, options: Section, config: Any) -> Iterator[str]:
        """Patterns that match nothing, and what LoRA cannot be combined with."""
        assert isinstance(options, LoraOptions)
        for key, value, allowed in (
            ("parallel.tp", config.parallel.tp, 1),
            ("parallel.pp", config.parallel.pp, 1),
            ("precision.linear", config.precision.linear == "fp8" and "fp8", False),
        ):
            if value != allowed:
                yield f"{key}: given {value} with adapters.lora; allowed: {allowed or 'auto'}, or no adapters"
        with torch.device("meta"):
            model = Transformer(config.model)
        linears = [*linear_layers(model)]
        modules = [name for name, module in model.named_modules() if any(True for _ in module.parameters(False))]
        targets = [] if options.target_modules == "all-linear" else options.target_modules
        for key, patterns, names in (
            ("target_modules", targets, linears),
            ("modules_to_save", options.modules_to_save, modules),
        ):
            for place, pattern in enumerate(patterns):
                if not any(_is_any(name, [pattern]) for name in names):
                    ends = sorted({name.rpartition(".")[2] for name in names})
                    close = difflib.get_close_matches(pattern, ends, n=1) or ends
                    yield (
                        f"adapters.lora.{key}[{place}]: given {pattern!r}, which matches none; allowed: names such as "
                        f"{', '.join(close)}, and patterns such as {names[0]}"
                    )
        if options.target_modules == []:
            yield "adapters.lora.target_modules: given [], which adapts nothing; give all-linear or names"
        trained = {
            name
            for name in linears
            if _is_any(name, options.modules_to_save) and (not targets or _is_any(name, targets))
        }
        if trained:
            given = f"names {min(trained)}, which target_modules gives adapters"
            yield f"adapters.lora.modules_to_save: {given}; name it once"

    def initial_values(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor | None:
        """Uniform values of variance 1 / (3 columns) for A, as peft draws them, and zeros for B and the change of m."""
        if name not in self.added:
            return None
        bound = shape[1] ** -0.5 if name.endswith(A) else 0.0
        return torch.empty(shape, device=generator.device).uniform_(-bound, bound, generator=generator)

    @torch.no_grad()
    def begin(self) -> None:
        """Note the checksum of the base, and keep it in `dtype`.

        Bits of the run stay as they are, since FSDP gathers the base in this dtype. It reads a parameter's dtype before
        its first gather (torch's `FSDPParamGroup.lazy_init`), which is later.
        """
        found = self._model.get_buffer(CHECKSUM).zero_()
        for name, parameter in self._model.named_parameters():
            if name in self.base and _counts(parameter):
                found += checksum(local_part(parameter))
        if dist.is_initialized():
            dist.all_reduce(found)
        self._found = int(found)
        for name, parameter in self._model.named_parameters():
            if name in self.base:
                kept = nn.Parameter(parameter.to(self.dtype), requires_grad=False)
                torch.utils.swap_tensors(parameter, kept)  # `data` of a DTensor would leave its shard as it is

    def check(self) -> None:
        """Compare the checksum that was loaded with that of the base that the model has."""
        if int(self._model.get_buffer(CHECKSUM)) != self._found:
            raise CheckpointError(
                "init_from: holds other weights than those with which the checkpoint's adapters were trained; restore "
                "the model that the run began with"
            )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the layers compute without adapters."""
        try:
            for layer in self.layers:
                layer.adapts = False
            yield
        finally:
            for layer in self.layers:
                layer.adapts = True


def linear_layers(model: Transformer) -> dict[str, nn.Linear]:
    """The linear layers of the blocks that may have adapters, by name: all but those of attention kinds."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("blocks.") and not kind_of_parameter(f"{name}.weight")
    }


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    """True if a module's name, or its end, is one of these names or matches one of these patterns."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for pattern in patterns)


def checksum(values: Tensor) -> int | Tensor:
    """Sum of the bits of float32 numbers, modulo 2**64: whatever the order in which ranks hold them."""
    return values.contiguous().view(torch.int32).sum(dtype=torch.int64)


def _counts(parameter: Tensor) -> bool:
    """True on the first of the ranks that hold this part of a parameter."""
    if not isinstance(parameter, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    place = parameter.device_mesh.get_coordinate()
    assert place is not None
    return not any(at for at, placement in zip(place, parameter.placements, strict=True) if placement.is_replicate())
