"""Result files: their numbers, and where the numbers come from."""

import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moba_train.attention.kernels.table import has_triton, triton_release
from moba_train.strict_json import to_json

END = "<!-- end of table -->"


def provenance(program: str | None = None) -> dict[str, Any]:
    """Command, commit (from $GIT_COMMIT in copies without a git history, else from `git`), device and versions.

    program: the module behind `python -m`; None: the program of this folder that is running
    """
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("GIT_COMMIT") or (asked.stdout.strip() if asked.returncode == 0 else "")
    cuda = torch.cuda.is_available()
    module = program or f"benchmarks.{Path(sys.argv[0]).stem}"
    return {
        "command": shlex.join([*_launcher(), "-m", module, *sys.argv[1:]]),
        "commit": commit or "unknown",
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "devices": torch.cuda.device_count() if cuda else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton_release() if has_triton() else None,
        "python": platform.python_version(),
    }


def _launcher() -> list[str]:
    ranks = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return ["torchrun", "--nproc-per-node", ranks] if ranks else ["python"]


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum, maximum and count of `values`."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "count": len(values)}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest))


def insert_tables(text: str, tables: Mapping[str, str]) -> str:
    """`text` with each of the `tables`, by marker, between the marker and the next `END`.

    Raises ValueError where the text has none of the markers, or one without END.
    """
    found = [marker for marker in tables if marker in text]
    if not found:
        raise ValueError(f"no place for a table: one of the lines {', '.join(map(repr, tables))} is needed")
    for marker in found:
        before, _, rest = text.partition(marker)
        _, end, after = rest.partition(END)
        if not end:
            raise ValueError(f"no place for the table: the line {END!r} is needed after {marker!r}")
        text = f"{before}{marker}\n\n{tables[marker]}\n\n{END}{after}"
    return text


def save(path: Path, settings: dict[str, Any], results: Any) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json({**provenance(), "settings": settings, "results": results}, indent=2) + "\n")
