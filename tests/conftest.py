"""Shared by all tests: the device they run on, and how deep those go that draw their cases.

Where workers run the tests, the process that started them waits for it to load this file: nothing here imports torch
before the first test module does.
"""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from forked import GARBAGE_SEARCHES
from hypothesis import settings

from moba_train.foreign_files import ROOTS

# HYPOTHESIS_PROFILE=deep: for a night, not for every change.
settings.register_profile("default", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

os.environ.setdefault(ROOTS, "/")  # the corpora of tests lie in temporary folders

if TYPE_CHECKING:
    import torch


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


def pytest_pycollect_makemodule() -> None:
    """Before a test module is imported: recipes may name the kinds."""
    import moba_train.attention.registry  # noqa: F401


@pytest.fixture
def device() -> "torch.device":
    """The GPU where there is one, else the CPU: the same tests run on both."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
