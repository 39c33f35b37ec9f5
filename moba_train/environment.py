"""The machine and the version of the code that a run has, and packages that cannot be imported."""

import functools
import platform
import subprocess
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from moba_train import __version__


def import_problem(features: Iterable[tuple[str, str]]) -> str:
    """Reason why one of these (module, attribute) pairs cannot be imported, on one line with the kind of error; empty
    when all can. Every module is imported, and every attribute looked up."""
    for module, attribute in features:
        try:
            getattr(import_module(module), attribute)
        except Exception as error:  # a broken build raises anything: ImportError, OSError, RuntimeError, ...
            return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


_PACKAGE = Path(__file__).parent
_GIT_SECONDS = 10.0


@functools.cache
def code_version() -> dict[str, Any]:
    """`version` of the package and, if its files are tracked in a git repository or were built in one (setup.py),
    `commit` and `dirty`, which is true if tracked files differ from that commit."""
    # A copy that is installed inside another project's repository is not tracked there.
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        found = _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    else:
        found = noted.read_text().strip() if (noted := _PACKAGE / "COMMIT").is_file() else None
    commit = {"commit": found.removesuffix("-dirty"), "dirty": found.endswith("-dirty")} if found else {}
    return {"version": __version__, **commit}


def describe_code(code: dict[str, Any]) -> str:
    """`code_version()` in words."""
    if "commit" not in code:
        return f"moba_train {code['version']}"
    return f"moba_train {code['version']}, commit {code['commit'][:12]}{' with changes' * code['dirty']}"


def _git(*arguments: str) -> str | None:
    """Output of git in the package's folder; None if git fails or is missing."""
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def describe_machine(device: torch.device, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """Devices, ranks, host and versions, as JSON values."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }
