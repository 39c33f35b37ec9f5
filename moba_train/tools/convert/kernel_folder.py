"""The kernels of attention to selected blocks as a folder of their own, in the layout of Hugging Face's kernels hub.

A kernel without compiled parts is the Python package build/torch-universal, whose imports are relative and whose
metadata.json says what it is and names no dependency. Ours is the files that kernel_entry.py imports and every kernel
of the forward pass in the table of kernels, with their imports changed and nothing else.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import moba_train
from moba_train.attention.kernels.table import KERNELS
from moba_train.output_files import write_new

FOLDER = Path("kernels", "build", "torch-universal")
"""The package in an export."""
_PACKAGE = Path(moba_train.__file__).parent
_ENTRY = "tools/convert/kernel_entry.py"
_IMPORT = re.compile(r"^( *from )moba_train\.([\w.]+)(?= import )", flags=re.MULTILINE)


def write_kernels(output: Path) -> None:
    """Write the kernels into the folder of an export."""
    folder = output / FOLDER
    digest = hashlib.sha256()
    for path in _needed():
        target = folder / ("__init__.py" if path == _ENTRY else path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # One dot is the file's own package; the root has one for an entry, and one more for each folder below.
        dots = "." * (1 if path == _ENTRY else path.count("/") + 1)
        text = _IMPORT.sub(rf"\g<1>{dots}\g<2>", (_PACKAGE / path).read_text(encoding="utf-8"))
        digest.update(text.encode())
        write_new(target, text)
    metadata = {
        "name": "moba-train-kernels",
        "id": f"_moba_train_kernels_{digest.hexdigest()[:8]}",
        "version": 1,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    write_new(folder / "metadata.json", json.dumps(metadata, indent=2) + "\n")


@cache
def _needed() -> tuple[str, ...]:
    """Files of our package, relative to it: the entry, the kernels and all that these import. Read once: exports of
    several models write the same ones."""
    found: set[str] = set()
    waiting = [_ENTRY, *(f"attention/kernels/{row.file}" for row in KERNELS if row.does == "forward")]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported(path)
            # Folders are packages, whose own files are imported first.
            parents = [f"{parent}/__init__.py" for parent in Path(path).parents if path != _ENTRY and parent.name]
            waiting += [file for file in parents if (_PACKAGE / file).is_file()]
    return tuple(sorted(found))


def _imported(path: str) -> Iterator[str]:
    """Our files that a file imports."""
    for node in ast.walk(ast.parse((_PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("moba_train."):
            module = node.module.removeprefix("moba_train.").replace(".", "/")
            for name in [module, *(f"{module}/{alias.name}" for alias in node.names)]:
                yield from (file for file in (f"{name}.py", f"{name}/__init__.py") if (_PACKAGE / file).is_file())
