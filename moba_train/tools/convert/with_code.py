"""Exports that run without this package: the modelling code that travels with the weights, and what it can run.

The code is remote_code/, for transformers with `trust_remote_code`; an export has its files as sections of one. What it
can run is listed in its file options.py.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moba_train.attention.kind import AttentionKind
from moba_train.config.model import LayerRope
from moba_train.output_files import write_new
from moba_train.tools.convert.hf_export import full_entry
from moba_train.tools.convert.kernel_folder import write_kernels
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
