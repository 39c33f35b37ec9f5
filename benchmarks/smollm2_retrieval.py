"""Puts what `moba-train eval` found about SmolLM2 and its 32K extension into one result file.

    bash launch/smollm2.sh retrieval      # evaluates both, then calls this

Needle maps, RULER's tasks, gate probes and loss by position, each with MoBA and full attention on the same weights.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.record import save

_LEFT_OUT = ("time", "ranks", "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="evaluation.json of the model as published")
    parser.add_argument("--extended", type=Path, required=True, help="evaluation.json of the extension")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    results = {name: _read(getattr(given, name)) for name in ("published", "extended")}
    save(given.output, {name: result["options"] for name, result in results.items()}, results)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return {key: value for key, value in content.items() if key not in _LEFT_OUT}


if __name__ == "__main__":
    main()
