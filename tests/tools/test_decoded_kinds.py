"""The core's kinds of attention decode what they were trained to compute, in layers with sinks and gates as well."""

from typing import Any

import pytest

from moba_train.tools.inference.cache import Decode
from tests.attention.kind_checks import MODEL, small_model
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


LAYERS: dict[str, Any] = {
    "norms": "both",
    "sink_layers": "all",
    "gate_layers": "last:1",
    "attention_scale": 0.2,
    "rope": {"fraction": 0.5, "overrides": {0: {"kind": "nope"}}},
}


@pytest.mark.parametrize(
    ("name", "options", "decode"),
    [
        ("full", {}, "own"),
        ("moba", {"block_size": 4, "topk": 3}, "own"),
        ("moba", {"block_size": 4, "topk": 9}, "full"),
        ("window", {"window": 5}, "full"),
    ],
)
def test_they_decode_as_they_were_trained(
    name: str, options: dict[str, Any], decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODEL.model_validate(MODEL.model_dump() | LAYERS)
    monkeypatch.setattr("tests.tools.decoding_checks.small_model", lambda kind, given: small_model(kind, given, model))
    assert_decodes_like_training(name, options, decode=decode)
