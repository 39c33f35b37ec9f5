"""The code a run was trained with."""

import functools
import subprocess
from pathlib import Path
from typing import Any

from moba_train import __version__

_PACKAGE = Path(__file__).parents[1]
_GIT_SECONDS = 10.0


@functools.cache
def code_version() -> dict[str, Any]:
    """`version` of the package and, if its files are tracked in a git repository, `commit` and `dirty`: whether tracked
    files differ from that commit."""
    found: dict[str, Any] = {"version": __version__}
    # A copy that is installed inside another project's repository is not tracked there.
    if _git("ls-files", "--error-unmatch", "__init__.py") is None or (commit := _git("rev-parse", "HEAD")) is None:
        return found
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return found | {"commit": commit, "dirty": changes != ""}


def describe(code: dict[str, Any]) -> str:
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
