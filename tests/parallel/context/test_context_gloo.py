"""Context parallelism between real processes, over gloo."""

import pytest

from tests.parallel.context.context_ranks import CHECKS, run_checks


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(4, CHECKS, tmp_path_factory.mktemp("context"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKS)
def test_between_processes(check: str, errors: dict[str, str]) -> None:
    assert check not in errors, errors[check]
