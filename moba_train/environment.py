"""Versions, GPUs and optional packages of this machine. A package is probed by importing the features that we use."""

import importlib
import importlib.metadata
import platform
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moba_train import __version__


@dataclass(frozen=True)
class OptionalPackage:
    """A distribution's name, the (module, attribute) pairs that we use, and how to install it."""

    name: str
    features: tuple[tuple[str, str], ...]
    install: str


OPTIONAL_PACKAGES = (
    OptionalPackage(
        "flash-attn", (("flash_attn", "flash_attn_varlen_func"),), "pip install flash-attn --no-build-isolation"
    ),
    # Has only pre-releases, which share the namespace of flash-attn. The pinned packages are those it was tested with.
    OptionalPackage(
        "flash-attn-4",
        (("flash_attn.cute.interface", "_flash_attn_fwd"), ("flash_attn.cute.interface", "_flash_attn_bwd")),
        "pip install flash-attn-4==4.0.0b18 'nvidia-cutlass-dsl[cu13]==4.5.2' quack-kernels==0.5.0",
    ),
    OptionalPackage(
        "transformer-engine",
        (("transformer_engine.pytorch", "Linear"),),
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    # The PyPI package "apex" is something else; NVIDIA's has these two modules when built with its CUDA extensions.
    OptionalPackage(
        "apex",
        (("apex.optimizers", "FusedAdam"), ("amp_C", "multi_tensor_adam")),
        "NVIDIA apex, from source only: github.com/NVIDIA/apex; the package of that name on PyPI is unrelated",
    ),
    OptionalPackage("deepspeed", (("deepspeed", "initialize"),), "pip install deepspeed"),
    OptionalPackage("torchao", (("torchao.float8", "convert_to_float8_training"),), "pip install torchao"),
    OptionalPackage("liger-kernel", (("liger_kernel.transformers", "LigerRMSNorm"),), "pip install liger-kernel"),
    OptionalPackage("tokenizers", (("tokenizers", "Tokenizer"),), "pip install tokenizers"),
    OptionalPackage("transformers", (("transformers", "AutoConfig"),), "pip install transformers"),
    OptionalPackage("tensorboard", (("torch.utils.tensorboard", "SummaryWriter"),), "pip install tensorboard"),
    OptionalPackage("wandb", (("wandb", "init"),), "pip install wandb"),
    OptionalPackage("nvidia-ml-py", (("pynvml", "nvmlInit"),), "pip install nvidia-ml-py"),
)


def probe(package: OptionalPackage) -> str | None:
    """Reason why `package` cannot be used, None if it can. Imports every module and looks up every attribute."""
    for module, attribute in package.features:
        try:
            getattr(importlib.import_module(module), attribute)
        except Exception as error:  # a broken build raises anything: OSError, RuntimeError, AttributeError, ...
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return None


def print_environment(console: Console) -> None:
    """Print versions, GPUs and the state of every optional package."""
    versions = {
        "moba-train": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton") or "absent (comes with torch's GPU builds)",
        "CUDA of torch": torch.version.cuda or "none: a CPU build of torch",
    }
    for name, version in versions.items():
        console.print(f"{name}: {version}", highlight=False)
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        console.print(f"GPU {index}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}")
    if not torch.cuda.device_count():
        console.print("GPU: none")

    table = Table(title="Optional packages", title_justify="left")
    for column in ("package", "version", "state"):
        table.add_column(column, overflow="fold")
    for package in OPTIONAL_PACKAGES:
        reason = probe(package)
        state = "usable" if reason is None else escape(f"{reason}\n{package.install}")
        table.add_row(package.name, _version(package.name) or "-", state)
    console.print(table)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
