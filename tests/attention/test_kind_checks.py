"""The checks of kind_checks.py on a kind that gathers and is given its blocks, and on the kinds with engine calls."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moba_train.attention import registry
from moba_train.attention.block_sparse import GivenBlocks
from moba_train.attention.kernels.common.geometry import block_ids, first_blocks
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, TokenBytes
from moba_train.attention.shard import own_rows, padded
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    STRATEGIES,
    Layer,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    make_layer,
    results,
    run_layer,
)

LENGTHS = [12, 0, 1, 27]


class FirstBlocks(AttentionKind):
    """Own block and the document's first one, over keys that a matrix has mixed: gathers, and gives its blocks."""

    name = "first"

    class Options(Section):
        """No options."""

    def __init__(self, options: Section, head_dim: int) -> None:
        super().__init__(options, head_dim)
        self.blocks = GivenBlocks(4, 1, head_dim, "reference", "attention.first.backend")
        self.attentions = ()

    @classmethod
    def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
        return nn.Linear(model.head_width, model.head_width, bias=False)

    def mix(self, layer: LayerInput, parameters: nn.Module | None) -> tuple[Tensor, Tensor | None]:
        assert parameters is not None
        shard = layer.engine.shard(layer.layout)
        q = own_rows(layer.rotate(layer.q_THd), shard)
        k = shard.gather("k", parameters(own_rows(layer.rotate(layer.k_TKd), shard)))
        v = shard.gather("v", own_rows(layer.v_TKd, shard))
        layout = shard.layout
        own = block_ids(layout.q_tokens, layout.q_documents, layout, 4)
        first = first_blocks(layout.cu_seqlens, 4)[layout.q_documents]
        selected = torch.where(first < own, first, -1).int().expand(q.shape[1], -1).unsqueeze(-1)
        out, _ = shard.attend(q, k, v, self.blocks, selected)
        return padded(out, len(layer.x_TD)), None

    def pairs(self, model: ModelConfig, lengths: Sequence[int]) -> float:
        raise NotImplementedError

    def token_bytes(self, model: ModelConfig, batch: MicroBatch) -> TokenBytes:
        return TokenBytes(gathered=2 * batch.width * model.kv_heads * model.head_width)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with registry.KINDS.registered("first", FirstBlocks):
        yield


CASES = [("first", {}), ("moba", {"block_size": 4, "topk": 3}), ("full", {})]
each = pytest.mark.parametrize(("name", "options"), CASES, ids=[name for name, _ in CASES])


@each
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_that_share_a_sequence(name: str, options: dict[str, Any], strategy: CPStrategy) -> None:
    assert_ranks_equal_one_device(make_layer(name, options, LENGTHS), strategy)


def test_ranks_without_tokens() -> None:
    for strategy in STRATEGIES:
        assert_ranks_equal_one_device(make_layer("first", {}, [9]), strategy)  # 3, 3, 3 and none


@each
def test_packed_documents(name: str, options: dict[str, Any]) -> None:
    assert_documents_are_independent(name, options, LENGTHS)


def test_what_is_given_is_what_is_attended_to() -> None:
    """Against a mask in plain softmax."""
    layer = make_layer("first", {}, LENGTHS)

    def plain(layer: Layer) -> list[Tensor]:
        keys = layer.parameters(rotated(layer, layer.k)).repeat_interleave(2, 1)
        scores = torch.einsum("thd,shd->hts", rotated(layer, layer.q), keys) * 8**-0.5
        document, position, token = layer.layout.q_documents, layer.positions, torch.arange(40)
        same = document[:, None] == document[None, :]
        near = position[:, None] // 4 == position[None, :] // 4
        seen = same & (token[:, None] >= token[None, :]) & (near | (position[None, :] < 4))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return [torch.einsum("hts,shd->thd", weights, layer.v.repeat_interleave(2, 1))]

    torch.testing.assert_close(results(layer), results(layer, plain), rtol=0, atol=1e-12)


def rotated(layer: Layer, x: Tensor) -> Tensor:
    from moba_train.model.rope import apply_rope, rope_cos_sin

    return apply_rope(x, *rope_cos_sin(layer.positions, layer.model.rope, 8))


def test_compiled_layers_give_equal_numbers() -> None:
    layer = make_layer("first", {}, LENGTHS)
    compiled = torch.compile(run_layer, backend="aot_eager")
    torch.testing.assert_close(results(layer, compiled), results(layer), rtol=0, atol=1e-12)
