"""The core's kinds of attention decode what they were trained to compute."""

from typing import Any

import pytest

from moba_train.tools.inference.cache import Decode
from tests.attention.test_key_conv import widths
from tests.attention.test_kind_checks import each, registered  # noqa: F401
from tests.tools.decoding_checks import assert_decodes_like_training


@each
def test_each_kind_decodes(name: str, options: dict[str, Any]) -> None:
    assert_decodes_like_training(name, options)


@widths
@pytest.mark.parametrize("decode", ["own", "full"])
def test_a_convolution_of_keys_decodes(width: int, decode: Decode) -> None:
    """Prompts in parts, one of them shorter than the convolution, then both together."""
    options = {"block_size": 4, "topk": 3 if decode == "own" else 9, "key_conv": width}
    assert_decodes_like_training("moba", options, prompts=(13, 5), decode=decode)
