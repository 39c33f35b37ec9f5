"""The attention contract stays small enough to hold: members, lines, imports, and the path to the kernels.

The numbers of today are in docs/explanation/architecture.md; a limit that is passed asks for a simpler design, not for
another limit.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from moba_train.attention.engine import Engine, OperatorEngine
from moba_train.attention.facets import Decodes, Gated, Probed, TakesSelection
from moba_train.attention.handles import Handled
from moba_train.attention.kind import AttentionKind, TwoSublayers
from moba_train.attention.observer import Observer, StatisticsObserver
from moba_train.attention.operators import AcrossRanks
from moba_train.attention.protocol import BackwardState, LocalAttention
from moba_train.attention.shard import Shard

PACKAGE = Path(__file__).parents[2] / "moba_train"
FRAMEWORK = (
    "engine.py",
    "facets.py",
    "handles.py",
    "kind.py",
    "layout.py",
    "observer.py",
    "operators.py",
    "protocol.py",
    "registry.py",
    "shard.py",
    "statistics.py",
)
"""The files of attention/ that stand before a kind begins; partial results are merged in kernels/common/merge.py."""
CONTRACT = (
    Handled,
    LocalAttention,
    Decodes,
    Probed,
    Gated,
    TakesSelection,
    AttentionKind,
    TwoSublayers,
    Shard,
    Engine,
    AcrossRanks,
    OperatorEngine,
    Observer,
    StatisticsObserver,
    BackwardState,
)
"""The classes with behaviour. Records of plain fields (`AttentionFacts`, `KindFacts`, `LayerInput`, ...) and the layout
are not counted."""


def members(of: type) -> set[str]:
    """Public methods, properties and attributes that a class adds to those of its bases, and `__call__`."""
    own = {*vars(of), *vars(of).get("__annotations__", {})}
    if issubclass(of, tuple):
        own -= {*of._fields, "count", "index"}  # type: ignore[attr-defined]  # a NamedTuple's
    inherited = {name for base in of.__mro__[1:] for name in {*vars(base), *vars(base).get("__annotations__", {})}}
    return {name for name in own - inherited if not name.startswith("_") or name == "__call__"}


def test_at_most_45_members() -> None:
    found = {of.__name__: sorted(members(of)) for of in CONTRACT}
    assert sum(map(len, found.values())) <= 45, found
    assert found["LocalAttention"] == ["attend", "attend_backward", "empty_selection", "facts", "select", "summarize"]


@pytest.mark.parametrize("names", [("summarize",), ("select",), ("empty_selection", "summarize")], ids=str)
def test_an_attention_that_selects_by_half_is_refused(names: tuple[str, ...]) -> None:
    """A kind, also another package's, that has forgotten `select` would attend as if nothing were selected."""
    with pytest.raises(TypeError, match=f"Local: given {' and '.join(names)}; allowed: none, or select and empty_sel"):
        type("Local", (LocalAttention,), dict.fromkeys(names))


def test_a_facet_is_nothing_that_every_attention_has() -> None:
    """No default on the base class: an attention without the facet lacks its functions."""
    for facet in (Decodes, Probed, Gated, TakesSelection):
        assert members(facet) == facet.__abstractmethods__
        assert not any(hasattr(LocalAttention, name) for name in members(facet))


def test_at_most_1250_lines() -> None:
    found = {name: len((PACKAGE / "attention" / name).read_text().splitlines()) for name in FRAMEWORK}
    assert sum(found.values()) <= 1250, found
    here = {path.name for path in (PACKAGE / "attention").glob("*.py")}
    kinds = {"__init__.py", "block_sparse.py", "convolution.py"}
    assert here - kinds == {name for name in FRAMEWORK if "/" not in name}, "count a new file of the framework as well"


@cache
def imported(path: Path) -> frozenset[Path]:
    """Files of the package that a file imports when it is imported, or for type checkers alone."""

    def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in body:
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from statements([child for child in ast.walk(node) if isinstance(child, ast.stmt)][1:])
            yield node

    names: set[str] = set()
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in submodules if file_of(name)} or {node.module}
    return frozenset(file for name in names if (file := file_of(name)) and file != path)


def file_of(module: str) -> Path | None:
    if not module.startswith("moba_train"):
        return None
    path = PACKAGE.parent / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def circle(start: Path, path: tuple[Path, ...] = (), done: set[Path] | None = None) -> tuple[Path, ...]:
    """The first circle of imports that is found from a file on; empty without any."""
    done = set() if done is None else done
    if start in path:
        return (*path[path.index(start) :], start)
    if start in done:
        return ()
    for file in sorted(imported(start)):
        if found := circle(file, (*path, start), done):
            return found
    done.add(start)
    return ()


def test_no_circle_of_imports() -> None:
    done: set[Path] = set()
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(imported(PACKAGE / "attention" / "engine.py")) > 3, "imports are not found"
    found = next((path for file in files if (path := circle(file, (), done))), ())
    assert found == (), " -> ".join(str(file.relative_to(PACKAGE)) for file in found)


def test_at_most_24_functions_to_the_kernels() -> None:
    pytest.importorskip("triton")
    from tests.attention.path import Stop, on_one_device

    first, later, plain = on_one_device(), on_one_device(layers=2), on_one_device("reference")
    for trace in (first, later, plain):
        assert len(trace.stops) <= 24, [*trace.stops]
        assert Stop("model/block.py", "Attention.forward") in trace.stops
    assert {"_pool", "_select", "forward_history"} <= first.kernels
