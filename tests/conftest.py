"""Shared by all tests: the device they run on, and how deep those go that draw their cases.

Where workers run the tests, the process that started them waits for it to load this file: nothing here imports torch
before the first test module does.
"""

import ast
import gc
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from moba_train.foreign_files import ROOTS
from tests.forked import GARBAGE_SEARCHES, TASKS, end_process_groups

# HYPOTHESIS_PROFILE=deep: for a night, not for every change.
settings.register_profile("default", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

os.environ.setdefault(ROOTS, "/")  # the corpora of tests lie in temporary folders
# Compiled code for CPUs is plain: to find out which vectors the C++ compiler knows takes torch 6 s of processor time.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

ROOT = Path(__file__).parents[1]

if TYPE_CHECKING:
    import torch

    from moba_train.parallel.world import World
    from tests.run.tiny_run import Run
    from tests.run.trainer_ranks import Ranks


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports and collects without searching for garbage, and keeps what is there then out of all later searches: they
    would walk a million objects of torch and pytest, in this process and in all its forks."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*GARBAGE_SEARCHES)
        gc.enable()


_threads = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Ends what process groups of a test have left in this process."""
    global _threads
    yield
    if os.path.isdir(TASKS) and len(os.listdir(TASKS)) > _threads + 8:
        _threads = end_process_groups()


LEFT_OUT = [part for part in ("mechanisms", "tools") if find_spec(f"moba_train.{part}") is None]
"""Parts of the package that this copy of the tree does not have (.ci/core_alone.sh)."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Files that need a part which is not there, themselves or by a helper, are no tests of the core."""
    return True if LEFT_OUT and collection_path.suffix == ".py" and _needs_more(collection_path) else None


@cache
def _needs_more(path: Path) -> bool:
    """True if what the file imports when it is loaded, itself or by a helper, is not all there."""
    statements = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for node in statements for alias in node.names
    }
    # The writer of corpora is left in the copy.
    others = re.compile(
        r"(moba_train|tests)\.(mechanisms|tools|data_tools)\b|(data_tools(?!\.corpus_writer)|benchmarks|experiments)\b"
    )
    if any(map(others.match, names)):
        return True
    helpers = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    helpers += [helper.parent.with_suffix(".py") for helper in helpers]
    return any(_needs_more(helper) for helper in helpers if helper.is_file() and helper != path)


def pytest_pycollect_makemodule() -> None:
    """Before a test module is imported: recipes may name the kinds."""
    import moba_train.attention.registry  # noqa: F401


@pytest.fixture
def device() -> "torch.device":
    """The GPU where there is one, else the CPU: the same tests run on both."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora to train on, and one to validate with."""
    from tests.run.tiny_run import write_corpus

    folder = tmp_path_factory.mktemp("corpora")
    for index, name in enumerate(("one", "two", "valid")):
        write_corpus(folder / name, 60, index)
    return folder


@pytest.fixture
def run(tmp_path: Path, corpora: Path) -> "Run":
    """A tiny run in a folder of its own."""
    from tests.run.tiny_run import Run

    return Run(tmp_path, corpora)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, corpora: Path, ranks: "Ranks") -> "Run":
    """One undisturbed run on two ranks, to compare others with. Not to be changed."""
    from tests.run.tiny_run import Run

    undisturbed = Run(tmp_path_factory.mktemp("finished"), corpora)
    ranks.train(undisturbed, 2)
    return undisturbed


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """Processes that all tests share, on the CPU."""
    from tests.run.trainer_ranks import Ranks

    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a corpus, for evaluations that ask questions."""
    from tests.tools import questions

    folder = tmp_path_factory.mktemp("texts")
    questions.write_data(folder)
    return folder


@pytest.fixture
def alone() -> Iterator["World"]:
    """One rank."""
    from moba_train.parallel.world import joined_world

    with joined_world() as world:
        yield world


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
