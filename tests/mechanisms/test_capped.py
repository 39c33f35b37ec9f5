"""Attention over capped scores against its definition in float64, every gradient; on ranks, in packed documents, while
decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moba_train.attention.registry import KINDS
from tests.attention.kind_checks import MODEL, Layer, make_layer, results
from tests.attention.test_kind_checks import rotated

LENGTHS = [13, 0, 1, 9]
CAP = 0.7
"""Below most scores, so that the cap changes them."""
CASES = [{"cap": CAP}, {"cap": CAP, "window": 5}]
both = pytest.mark.parametrize("options", CASES, ids=["all", "window"])


def oracle(layer: Layer) -> list[Tensor]:
    """Softmax of cap tanh(scores / cap) over the keys of the document, or of its window."""
    q, k = rotated(layer, layer.q), rotated(layer, layer.k)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, layer.v))
    tokens = torch.arange(len(q))
    documents = layer.layout.documents(layer.layout.q_tokens)
    back = tokens[:, None] - tokens
    window = layer.kind.options.model_dump()["window"] or len(q)
    allowed = (documents[:, None] == documents) & (back >= 0) & (back < window)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    assert scores.abs().max() > 2 * CAP
    capped = CAP * torch.tanh(scores / CAP)
    return [torch.einsum("hts,shd->thd", capped.masked_fill(~allowed, -torch.inf).softmax(-1), v)]


@both
def test_output_and_every_gradient_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    layer = make_layer("capped", options, LENGTHS)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-12)


@both
def test_pairs_are_those_without_a_cap(options: dict[str, Any]) -> None:
    kind = KINDS["capped"](KINDS["capped"].Options.model_validate(options), 8)
    same = KINDS["window"](KINDS["window"].Options.model_validate({"window": options.get("window", 100)}), 8)
    assert kind.pairs(MODEL, [20, 3]) == same.pairs(MODEL, [20, 3])
