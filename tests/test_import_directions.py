"""Who may import whom. Read from the source, so that a lazy import counts too."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import LEFT_OUT

PACKAGE = Path(__file__).parents[1] / "moba_train"

ORDER = (
    "tools",
    "mechanisms",
    "train",
    "run",
    "resolve",
    "evals",
    "health",
    "checkpoint",
    "memory",
    "parallel",
    "telemetry",
    "optim",
    "data",
    "model",
    "attention",
    "config",
    "output_files",
    "foreign_files",
    "environment",
    "strict_json",
    "terminal",
    "registry",
    "torch_private",
    "errors",
)
"""Three parts: tools, mechanisms and, from `train` on, the core. What uses stands above what is used: a folder imports
itself and those below, never upward. The one place where the order is written down; docs/explanation/architecture.md
says what each folder is for."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports(path: Path) -> set[str]:
    """Every module a file imports anywhere; `from a import b` counts as a and a.b, and relative imports are resolved.

    An attribute chain such as `torch.distributed.all_reduce` counts as well: it works without an import of its own.
    """
    found: set[str] = set()
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


def importers(of: str, under: str = "") -> set[str]:
    """Modules below `under` that import the module `of` or anything inside it."""
    files = sorted((PACKAGE / under).rglob("*.py"))
    return {
        module_name(path) for path in files if any(name == of or name.startswith(of + ".") for name in imports(path))
    }


def test_the_reader_of_imports_sees_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests below: they would pass for ever if this found nothing."""
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "moba_train")
    folder = tmp_path / "moba_train" / "model"
    folder.mkdir(parents=True)
    forms = {
        "plain": "import torch.distributed as dist",
        "from_": "from torch import distributed",
        "inner": "def f():\n    from torch.distributed.tensor import DTensor",
        "chain": "import torch\ntorch.distributed.barrier()",
        "relative": "from ..run.trainer import train",
        "none": "import torch",
    }
    for name, text in forms.items():
        (folder / f"{name}.py").write_text(text)
    assert importers("torch.distributed") == {f"moba_train.model.{n}" for n in ("plain", "from_", "inner", "chain")}
    assert importers("moba_train.run.trainer") == {"moba_train.model.relative"}


def folder(module: str) -> str:
    """The folder, or file at the top of the package, that a module of the package belongs to."""
    return module.split(".")[1]


def test_every_folder_has_its_place_in_the_order() -> None:
    paths = (path for path in PACKAGE.iterdir() if path.name[0].isalpha() and not path.is_symlink())  # link: configs
    found = {path.name.removesuffix(".py") for path in paths}
    assert found == {name for name in ORDER if name not in LEFT_OUT}


@pytest.mark.parametrize("name", [name for name in ORDER if name not in LEFT_OUT])
def test_nothing_imports_upward(name: str) -> None:
    files = sorted((PACKAGE / name).rglob("*.py")) or [PACKAGE / f"{name}.py"]
    above = set(ORDER[: ORDER.index(name)])
    upward = [
        (module_name(path), imported)
        for path in files
        for imported in imports(path)
        if imported.startswith("moba_train.") and folder(imported) in above
    ]
    assert upward == []


def test_attention_knows_nothing_of_ranks() -> None:
    assert importers("torch.distributed", "attention") == set()
    assert importers("moba_train.parallel", "attention") == set()


def test_the_model_is_a_single_device_program() -> None:
    """`build` alone touches DTensor: it fills shards of weights that are drawn whole."""
    assert importers("torch.distributed", "model") <= {"moba_train.model.build"}
    assert importers("moba_train.parallel", "model") == set()


def test_the_transformer_knows_the_protocol_and_no_kind_of_attention() -> None:
    for file in ("transformer.py", "block.py"):
        ours = {name for name in imports(PACKAGE / "model" / file) if name.startswith("moba_train.attention.")}
        assert {name.split(".")[2] for name in ours} <= {"engine", "kind", "layout"}


def test_context_parallelism_never_hears_of_blocks() -> None:
    assert importers("moba_train.attention.moba", "parallel/context") == set()


def test_attention_to_selected_blocks_knows_no_selector() -> None:
    assert importers("moba_train.attention.moba", "attention/kernels") == set()


def test_one_file_of_context_parallelism_talks_to_other_ranks() -> None:
    """The engine knows what a process group is, to hand it on."""
    context = "moba_train.parallel.context"
    assert importers("torch.distributed", "parallel/context") == {f"{context}.comm", f"{context}.engine"}
