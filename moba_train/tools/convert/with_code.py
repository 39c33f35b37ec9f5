"""Exports that run without this package: the modelling code and the kernels that travel with the weights.

The code is remote_code/, for transformers with `trust_remote_code`; an export has its files as sections of one. What it
can run is listed in its file options.py.

The kernels of attention to selected blocks are a folder in the layout of Hugging Face's kernels hub. A kernel without
compiled parts is the Python package build/torch-universal, whose imports are relative and whose metadata.json says what
it is and names no dependency. Ours is the files that kernel_entry.py imports and every kernel of the forward pass in
the table of kernels, with their imports changed and nothing else.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import moba_train
from moba_train.attention.kernels.table import KERNELS
from moba_train.attention.kind import AttentionKind
from moba_train.config.model import LayerRope
from moba_train.output_files import write_new
from moba_train.tools.convert.hf_export import full_entry
from moba_train.tools.convert.remote_code.options import LAYERS, ROPES
from moba_train.tools.hf.family import Family

_CODE = Path(__file__).parent / "remote_code"
_SECTIONS = ("options", "cache", "attention", "selectors", "nsa", "linear", "groups", "experts", "modeling")
"""Files of the code, each behind those that it imports."""
_MODULE = "modeling_moba_train"
_OWN = "moba_train"
"""model_type of models that only the code can run."""
_PLAIN = ("llama", "qwen2", "qwen3")
"""Ordinary models that the code can run."""


def code_families(needed: bool) -> tuple[str, ...]:
    """Families whose models the code runs. needed: attention kinds have parameters, so that an ordinary model would
    compute something else."""
    return (_OWN,) if needed else (*_PLAIN, _OWN)


def code_problems(kinds: Sequence[AttentionKind], ropes: Sequence[LayerRope]) -> Iterator[str]:
    """Reasons why the code cannot run a model whose layers have these attention kinds and rotary embeddings."""
    for rope in dict.fromkeys(rope.kind for rope in ropes):
        if rope not in ROPES:
            yield f"rope {rope!r} is not one of {', '.join(ROPES)}, which the code of --with-code can run"
    for kind in dict.fromkeys(kinds):
        entry = full_entry(kind)
        parts = [part["options"] | {"kind": part["kind"]} for part in entry.get("parts", [])]
        for one in [entry, *parts]:
            name = one["kind"]
            if name not in LAYERS:
                yield f"kind {name!r} is not one of {', '.join(LAYERS)}, which the code of --with-code can run"
                continue
            given = {option for option, value in one.items() if value is not None}
            for option in sorted(given - {"kind"} - LAYERS[name]):
                yield f"option {option!r} of kind {name!r} is unknown to the code of --with-code"


def write_code(output: Path) -> None:
    """Write the code and its kernels into the folder of an export."""
    write_new(output / f"{_MODULE}.py", joined_code())
    write_kernels(output)


def joined_code() -> str:
    """The code as one module: the docstring of its last file, what all import from elsewhere, and the rest of each
    behind its docstring as a comment."""
    modules: set[str] = set()
    names: dict[str, set[str]] = {}
    sections = []
    for name in _SECTIONS:
        text = (_CODE / f"{name}.py").read_text(encoding="utf-8")
        about, *statements = ast.parse(text).body
        lines = text.splitlines()
        title = lines[: about.end_lineno]
        begin = 0
        for statement in statements:
            if isinstance(statement, ast.Import):
                modules.add(ast.unparse(statement))
            elif not isinstance(statement, ast.ImportFrom):
                break
            elif statement.level == 0 and statement.module:
                names.setdefault(statement.module, set()).update(alias.name for alias in statement.names)
            begin = statement.end_lineno or 0
        comment = [f"Section `{name}`"] if name == _SECTIONS[-1] else [f"Section `{name}`", "", *title]
        commented = [f"# {line}".rstrip() for line in "\n".join(comment).replace('"""', "").splitlines()]
        sections.append("\n".join(commented) + "\n\n" + "\n".join(lines[begin:]).strip())
    imports = [
        *sorted(modules),
        *(f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)),
    ]
    return "\n\n\n".join(["\n".join([*title, "", *imports]), *sections]) + "\n"


def code_config(family: Family) -> dict[str, Any]:
    """Entries of config.json for the code. A model that needs the code also names the code's config, so that
    transformers refuses it without `trust_remote_code`."""
    if family.needs_code:
        classes = {"AutoModelForCausalLM": f"{_MODULE}.MobaForCausalLM", "AutoConfig": f"{_MODULE}.MobaConfig"}
    else:
        classes = {"AutoModelForCausalLM": f"{_MODULE}.Moba{family.architecture}"}
    return {"moba_decode": "full", "auto_map": classes}


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
