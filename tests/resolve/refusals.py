"""Problems of a recipe, for the tests of refusals."""

from typing import Any

import pytest

from moba_train.config.schema import RunConfig
from moba_train.errors import ConfigError
from tests.resolved import check


def problems(config: RunConfig, *args: Any, **kwargs: Any) -> list[str]:
    """The problems for which `resolve` refuses the recipe."""
    with pytest.raises(ConfigError) as caught:
        check(config, *args, **kwargs)
    return caught.value.problems


def assert_refused(config: RunConfig, problem: str, *args: Any, **kwargs: Any) -> None:
    """`resolve` refuses the recipe, with a problem that begins with this text."""
    found = problems(config, *args, **kwargs)
    assert any(text.startswith(problem) for text in found), found
