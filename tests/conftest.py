"""Shared by all tests: the device they run on."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, else the CPU: the same tests run on both."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
