"""`moba-train env`: versions, GPUs, kernels and optional packages of this machine. A package is probed by importing the
features that we use."""

import importlib.metadata
import platform
import warnings
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from moba_train import __version__
from moba_train.attention.kernels.table import Facts, Machine, kernel_for, resolve_backend, this_machine
from moba_train.environment import import_problem

BEST_PAIR = ("2.11.0", "3.6.0")
"""torch, and the Triton that it brings, with which all kernels run: those of launch/gpu.lock."""


@dataclass(frozen=True)
class OptionalPackage:
    """A package that some part of this one uses where it is installed."""

    name: str
    """Name of the distribution, as pip knows it."""
    gives: str
    """The gain, and the feature that has it."""
    features: tuple[tuple[str, str], ...]
    """The (module, attribute) pairs that we use."""
    install: str


def _pip(name: str, gives: str, module: str, attribute: str, wanted: str = "") -> OptionalPackage:
    return OptionalPackage(name, gives, ((module, attribute),), f"pip install {wanted or name}")


OPTIONAL_PACKAGES = (
    OptionalPackage(
        "flash-attn",
        "attention.full.backend: flash2, and attention.moba.backend: composed where torch lacks its own kernel",
        tuple(
            ("flash_attn.flash_attn_interface", f"_wrapped_flash_attn_varlen_{way}") for way in ("forward", "backward")
        ),
        "pip install --no-build-isolation flash-attn==2.8.3.post2",
    ),
    # Has only pre-releases, which share the namespace of flash-attn. Pinned versions are those that were tried.
    OptionalPackage(
        "flash-attn-4",
        "the fastest kernel of full attention, and of MoBA from block size 2048",
        (("flash_attn.cute.interface", "_flash_attn_fwd"), ("flash_attn.cute.interface", "_flash_attn_bwd")),
        "pip install flash-attn-4==4.0.0b18 'nvidia-cutlass-dsl[cu13]==4.5.2' quack-kernels==0.5.0",
    ),
    OptionalPackage(
        "fla-core",
        "kernels of the attention kinds lightning and kda; kda trains on a GPU with them only",
        (("fla.ops.simple_gla", "chunk_simple_gla"), ("fla.ops.kda", "chunk_kda")),
        "pip install 'fla-core>=0.6.0'",
    ),
    OptionalPackage(
        "torchao",
        "precision.linear: fp8",
        (
            ("torchao.float8", "convert_to_float8_training"),
            ("torchao.float8", "precompute_float8_dynamic_scale_for_fsdp"),
        ),
        "pip install 'torchao>=0.18'",
    ),
    # Not on PyPI, where `apex` is an unrelated project.
    OptionalPackage(
        "apex",
        "optim.implementation: apex",
        (("amp_C", "multi_tensor_adam"),),
        "build NVIDIA's repository with its CUDA extensions: docs/how-to/optional-packages.md",
    ),
    OptionalPackage(
        "transformer-engine",
        "optim.implementation: transformer_engine, precision.implementation: transformer_engine",
        (("transformer_engine.pytorch", "Linear"), ("transformer_engine_torch", "multi_tensor_adam")),
        "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2': "
        "docs/how-to/optional-packages.md",
    ),
    OptionalPackage(
        "deepspeed",
        "optim.implementation: deepspeed_cpu",
        (("deepspeed.ops.adam", "DeepSpeedCPUAdam"),),
        "pip install deepspeed==0.19.8 ninja",
    ),
    _pip("wandb", "telemetry.wandb: curves, alerts and spikes in Weights & Biases", "wandb", "init"),
    _pip(
        "plotly", "report.html at the end of a run, moba-train report", "plotly.offline", "get_plotlyjs", "'plotly>=6'"
    ),
    _pip("tensorboard", "telemetry.tensorboard", "torch.utils.tensorboard", "SummaryWriter"),
    _pip("s3fs", "addresses s3://... of checkpoint.upload, init_from and moba-data", "s3fs", "S3FileSystem"),
    _pip("gcsfs", "addresses gs://... of the same", "gcsfs", "GCSFileSystem"),
    _pip("tokenizers", "tokenizer.json files, in moba-data and generate", "tokenizers", "Tokenizer"),
    _pip("tiktoken", "moba-data tokenize --tokenizer tiktoken:NAME", "tiktoken", "get_encoding"),
    _pip("fastokens", "moba-data tokenize, several times as fast", "fastokens", "Tokenizer"),
    _pip("pyarrow", "moba-data: .parquet input", "pyarrow.parquet", "ParquetFile"),
    _pip("zstandard", "moba-data: .zst input", "zstandard", "ZstdDecompressor"),
    OptionalPackage(
        "lm_eval",
        "moba-train lm-eval: the tasks of lm-evaluation-harness",
        (("lm_eval.evaluator", "evaluate"),),
        "pip install 'lm-eval[ruler]>=0.4.13' 'transformers>=5' tokenizers",
    ),
    _pip("transformers", "exported models in Hugging Face's programs", "transformers", "AutoConfig"),
)


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
    print_kernels(console, this_machine(torch.device("cuda" if torch.cuda.device_count() else "cpu")))

    table = Table(title="Optional packages", title_justify="left")
    for column in ("package", "what it gives", "version", "state"):
        table.add_column(column, overflow="fold")
    for package in OPTIONAL_PACKAGES:
        reason = import_problem(package.features)
        found = _version(package.name)
        if found is None and reason.startswith("ModuleNotFoundError"):
            reason = "not installed"
        state = f"{reason}\n{package.install}" if reason else "usable"
        table.add_row(package.name, package.gives, found or "-", state)
    console.print(table)


def print_kernels(console: Console, machine: Machine) -> None:
    """Print the kernels that block-sparse attention runs on, and how to get faster ones if another torch has them."""
    if machine.device != "cuda":
        console.print(f"block-sparse attention: {', '.join(_passes(machine, 512))}")
        return
    table = Table(title="Kernels of block-sparse attention, for bf16 and heads of 128", title_justify="left")
    for column in ("keys of a block", "forward pass", "backward pass"):
        table.add_column(column, overflow="fold")
    best = replace(machine, triton=BEST_PAIR[1])
    with warnings.catch_warnings(record=True) as lost:
        warnings.simplefilter("always")
        sizes = (128, 256, 512, 4096)
        for size in sizes:
            table.add_row(str(size), *_passes(machine, size))
        better = any(_passes(machine, size) != _passes(best, size) for size in sizes)
    console.print(table)
    for warning in lost:
        console.print(f"{warning.message}")
    if better:
        console.print(f"faster ones come with Triton {BEST_PAIR[1]}: pip install torch=={BEST_PAIR[0]}")


def _passes(machine: Machine, block_size: int) -> list[str]:
    """Kernels of `auto` in the forward and the backward pass of a long call; on the CPU one name for both."""
    facts = Facts(machine, torch.bfloat16, 128, block_size, history_blocks=7, rows=2**21)
    backend = resolve_backend("", "auto", facts)
    if backend.order[0] != "triton":
        return [f"{backend.order[0]}, {backend.why}"] * (1 if machine.device == "cpu" else 2)
    return [kernel_for(does, facts).file for does in ("forward", "backward")]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
