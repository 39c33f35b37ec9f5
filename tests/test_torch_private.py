"""torch's private names stand in one file, each with what it was tried with and what fails without it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moba_train import torch_private

PACKAGE = Path(__file__).parents[1] / "moba_train"
OURS = PACKAGE / "torch_private.py"
ATTRIBUTES = {"_local_tensor", "_version", "_spec", "_micro_pipeline_tp"}
"""Private attributes of torch's objects, whatever the object is called."""


def private(name: str) -> bool:
    return any(re.match(r"_[A-Za-z]", part) for part in name.split("."))


def names(tree: ast.AST) -> Iterator[str]:
    """Private names of torch in a source file: imported, or reached from `torch` or `torch.ops`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if re.match(r"torch\b", alias.name) and private(alias.name))
        elif isinstance(node, ast.ImportFrom) and re.match(r"torch\b", node.module or ""):
            found = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in found if private(name))
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            reached = re.match(r"(torch|dist|_?aten|c10d|symmetric)\.[\w.]+$", text)
            if (reached and private(text)) or node.attr in ATTRIBUTES:
                yield text


def test_the_search_finds_every_form() -> None:
    forms = [
        *("import torch._inductor.config", "from torch._C import x", "from torch.utils import _pytree as t"),
        *("import torch\ntorch._foreach_norm([])", "torch.ops.aten._scaled_mm", "x._local_tensor", "f()._version"),
    ]
    assert all(list(names(ast.parse(form))) for form in forms)
    assert not list(names(ast.parse("import torchao._x\nself._spectrum\ntorch.foreach\nstate._replace()")))


def test_no_other_file_has_a_private_name_of_torch() -> None:
    files = sorted(path for path in PACKAGE.rglob("*.py") if path != OURS)
    found = {str(path.relative_to(PACKAGE)): [*names(ast.parse(path.read_text()))] for path in files}
    assert {path: private_names for path, private_names in found.items() if private_names} == {}


def test_every_entry_says_what_it_was_tried_with_and_what_fails_without_it() -> None:
    body = ast.parse(OURS.read_text()).body
    texts = [ast.get_docstring(node) for node in body if isinstance(node, ast.FunctionDef)]
    assigned = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    for node in assigned:
        following = body[body.index(node) + 1]
        if isinstance(following, ast.Expr):  # neighbours share a text
            texts.append(ast.literal_eval(following.value))
    assert len(texts) > 15
    for text in texts:
        assert re.search(r"Tried with torch 2\.\d\d", text or ""), text
        assert re.search(r"Without (it|them)", text or ""), text


def test_the_names_are_in_this_torch() -> None:
    x = torch.zeros(3)
    before = torch_private.tensor_version(x)
    x.add_(1)
    assert torch_private.tensor_version(x) == before + 1
    assert torch_private.current_dispatch_mode() is None
    assert torch_private.foreach_norm([x])[0] == pytest.approx(3**0.5)
    torch_private.set_deterministic_fill(torch_private.deterministic_fill())
    assert torch_private.dynamo_config().recompile_limit > 0
    assert "_micro_pipeline_tp" in torch_private.inductor_config()._config
    assert callable(torch_private.symmetric_memory().rendezvous)
