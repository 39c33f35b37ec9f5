"""Every benchmark program starts: most need a GPU to run, so nothing else would notice a name that has moved."""

import importlib
import pkgutil

import pytest

import benchmarks


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_it_can_be_imported(name):
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("triton is not installed")
