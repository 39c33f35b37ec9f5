"""A learned sink, a logit of each head without a value, in the kinds that take one: against a softmax with one column
more, in float64, for every gradient; on ranks, in packed documents, while decoding."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.kind import LayerInput
from moba_train.attention.layout import packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.registry import KINDS
from moba_train.config.base import Section
from moba_train.config.model import ModelConfig
from moba_train.model.block import Sink
from moba_train.parallel.context.strategy import CPStrategy
from tests.attention.kind_checks import (
    MODEL,
    STRATEGIES,
    Layer,
    assert_documents_are_independent,
    assert_ranks_equal_one_device,
    flat,
    make_layer,
    results,
    run_layer,
)
from tests.attention.test_kind_checks import rotated

LENGTHS = [13, 0, 1, 9]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full": (FullKind, {"backend": "reference"}),
    "moba": (MobaKind, {"block_size": 4, "topk": 2}),
}
each = pytest.mark.parametrize("name", CASES)


def with_sink(kind: Any) -> Any:
    """The kind with a sink of its own in each layer."""

    class WithSink(kind):
        @classmethod
        def parameters(cls, options: Section, model: ModelConfig, layer: int) -> nn.Module:
            return Sink(model.heads)

        def mix(self, layer: LayerInput, parameters: Any) -> Any:
            return super().mix(layer._replace(sink=(parameters(),)), None)

    return WithSink


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    with ExitStack() as stack:
        for name, (kind, _) in CASES.items():
            stack.enter_context(KINDS.registered(f"{name} with sink", with_sink(kind)))
        yield


def layer_of(name: str, **changes: Any) -> Layer:
    return make_layer(f"{name} with sink", CASES[name][1] | changes, LENGTHS)


def oracle(layer: Layer) -> list[Tensor]:
    """Each document by itself: a softmax over its keys and the sink, whose probability meets no value."""
    q = rotated(layer, layer.q)
    k = rotated(layer, layer.k)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, layer.v))
    allowed = layer.layout.documents(layer.layout.q_tokens)
    allowed = (allowed[:, None] == allowed) & torch.ones(len(q), len(q)).tril().bool()
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    sink = layer.parameters.weight[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return [torch.einsum("hts,shd->thd", weights, v)]


@pytest.mark.parametrize(("name", "changes"), [("full", {}), ("moba", {"topk": 9})])
def test_a_softmax_with_one_column_more(name: str, changes: dict[str, Any]) -> None:
    """MoBA with every block selected is full attention with the sink."""
    layer = layer_of(name, **changes)
    torch.testing.assert_close(results(layer), results(layer, oracle), rtol=0, atol=1e-12)


@each
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_ranks_that_share_a_sequence_are_one_device(name: str, strategy: CPStrategy) -> None:
    assert_ranks_equal_one_device(make_layer(f"{name} with sink", CASES[name][1], [29, 0, 1, 34]), strategy)


@each
def test_packed_documents_are_what_they_are_alone(name: str) -> None:
    assert_documents_are_independent(f"{name} with sink", CASES[name][1], LENGTHS)


@each
def test_compiled_layers_under_activation_checkpointing(name: str) -> None:
    compiled = torch.compile(run_layer, backend="aot_eager")
    got = results(layer_of(name), lambda layer: checkpoint(compiled, layer, use_reentrant=False))
    torch.testing.assert_close(got, results(layer_of(name)), rtol=0, atol=1e-12)


@each
def test_a_sink_far_below_all_scores_changes_nothing_and_one_far_above_leaves_nothing(name: str) -> None:
    layer = layer_of(name)
    sinks = {}
    for value in (-1e4, 1e4):
        layer.parameters.weight.data.fill_(value)
        sinks[value] = results(layer)
    kind, options = CASES[name]
    want = results(layer.with_inputs(layer.inputs(), kind=kind(kind.Options(**options), 8), parameters=None))
    torch.testing.assert_close(sinks[-1e4][:2], want[:2], rtol=0, atol=1e-12)
    assert [x.abs().max().item() for x in (*sinks[1e4][0], *sinks[1e4][1])] == [0.0] * 5


def assert_near_float64(name: str, options: dict[str, Any], reference: dict[str, Any], device: torch.device) -> None:
    """Output and every gradient of a kind with a sink, in bf16 on `device`, are those of float64 on the CPU."""
    lengths = [300, 0, 1, 211]
    model = MODEL.model_copy(update={"head_dim": 64})
    found = []
    for chosen, place, dtype in ((options, device, torch.bfloat16), (reference, "cpu", torch.float64)):
        layer = make_layer(name, chosen, lengths, model=model)
        for tensor in (*layer.inputs(), *layer.named_parameters().values()):
            tensor.data = tensor.data.bfloat16().to(place, dtype)
        layer.layout = packed_layout(lengths, place)
        found.append(flat(results(layer)))
    for index, (got, want) in enumerate(zip(*found, strict=True)):
        assert (got.cpu().double() - want).norm() <= 2e-2 * want.norm(), index


def test_bf16_is_near_float64_in_plain_pytorch() -> None:
    """The next test's form for the CPU."""
    for name in CASES:
        options = CASES[name][1] | {"backend": "reference"}
        options |= {"block_size": 64, "topk": 9} if name == "moba" else {}
        assert_near_float64(f"{name} with sink", options, options, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options", "backend"),
    [("full", {}, "auto"), ("moba", {"block_size": 64, "topk": 9}, "triton")],
    ids=["full", "moba"],
)
def test_kernels_are_as_exact_with_a_sink(name: str, options: dict[str, Any], backend: str) -> None:
    """All blocks are selected: near-ties may fall otherwise in bf16."""
    ours, plain = (options | {"backend": chosen} for chosen in (backend, "reference"))
    assert_near_float64(f"{name} with sink", ours, plain, torch.device("cuda"))
