"""Published numbers that figures draw, from published.json, which names the source of each."""

import json
from pathlib import Path
from typing import Any, NamedTuple


class Law(NamedTuple):
    """L(C) = a * C^b: loss in nats a token over compute in PFLOP/s-days."""

    a: float
    b: float

    def __call__(self, compute: float) -> float:
        """Return the loss at `compute`."""
        return float(self.a * compute**self.b)


_PUBLISHED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())


def _laws(name: str) -> dict[str, Law]:
    return {attention: Law(*law) for attention, law in _PUBLISHED[name]["laws"].items()}


VALIDATION_8K = _laws("validation_8k")
"""Validation loss at 8K tokens, by attention."""
TRAILING_32K = _laws("trailing_32k")
"""Loss of the last 2K of 32K tokens, by attention."""
TRAINED_COMPUTE = tuple(
    6 * parameters * tokens / (1e15 * 86400) for parameters, tokens in _PUBLISHED["models"]["parameters_and_tokens"]
)
"""6ND of the five models, PFLOP/s-days."""

POSITION_BUCKET: int = _PUBLISHED["position_32k"]["bucket_tokens"]
"""Tokens of a bucket of `POSITION_32K`."""
POSITION_32K = {
    attention: [Law(*law) for law in laws] for attention, laws in _PUBLISHED["position_32k"]["laws"].items()
}
"""Loss by position in 32K tokens: a law for each bucket, by attention."""

GRANULARITY_LOSS: dict[int, float] = {
    int(blocks): loss for blocks, loss in _PUBLISHED["granularity_32k"]["loss_by_blocks"].items()
}
"""Loss at 32K tokens by the number of blocks, of which a quarter is selected."""
GRANULARITY_FULL: float = _PUBLISHED["granularity_32k"]["full"]
"""Loss of full attention in the same place."""
