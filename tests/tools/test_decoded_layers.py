"""Layers with sinks, gates and rotary embeddings of their own decode what they were trained to compute."""

from typing import Any

import pytest

from moba_train.tools.inference.cache import Decode
from tests.attention.kind_checks import MODEL, small_model
from tests.tools.decoding_checks import assert_decodes_like_training

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
