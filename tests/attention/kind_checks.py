"""Checks that every attention kind of a layer must pass, whatever it computes: ranks, documents, decoding.

tests/mechanisms/test_every_kind.py has the cases of each kind. A kind's own test file compares one device with its
oracle.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moba_train.attention.engine import LOCAL_ENGINE, Engine
from moba_train.attention.kind import AttentionKind, LayerInput, MicroBatch, SublayerInput, TokenBytes, TwoSublayers
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.model import ModelConfig
from moba_train.model.build import initialize_weights
from moba_train.model.rope import apply_rope, rope_cos_sin
from moba_train.model.transformer import Transformer
from moba_train.parallel.context.engine import ContextParallel, RankShard
from moba_train.parallel.context.strategy import CPStrategy
from moba_train.parallel.context.transport.base import Transport
from tests.attention.helpers import labelled
from tests.thread_ranks import thread_transports

MODEL = ModelConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=8, init_std=0.3
)


@dataclass
class Layer:
    """One layer's kind, parameters and inputs, all float64 with gradient."""

    kind: Any  # each kind's own tests know its class and its parameters
    parameters: Any
    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    model: ModelConfig = MODEL

    @property
    def positions(self) -> Tensor:
        """Position of each token in its document."""
        return self.layout.positions(self.layout.q_tokens, self.layout.q_documents)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, q, k, v."""
        return self.x, self.q, self.k, self.v

    def with_inputs(self, inputs: Iterable[Tensor], **changes: Any) -> "Layer":
        """The layer with another x, q, k, v, and other changed fields."""
        x, q, k, v = inputs
        return replace(self, x=x, q=q, k=k, v=v, **changes)

    def named_parameters(self) -> dict[str, Tensor]:
        """The kind's parameters by name."""
        return dict(self.parameters.named_parameters()) if self.parameters is not None else {}


def make_layer(
    name: str, options: dict[str, Any], lengths: list[int], *, model: ModelConfig = MODEL, layer: int = 0, seed: int = 0
) -> Layer:
    """A layer of the kind `name` over documents of these lengths, with random inputs and parameters."""
    chosen = KINDS[name].Options(**options)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    parameters = KINDS[name].parameters(chosen, model, layer)
    if parameters is not None:
        parameters = parameters.double()
        with torch.no_grad():
            for parameter in parameters.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    tokens = sum(lengths)
    width = model.head_width
    return Layer(
        KINDS[name](chosen, width),
        parameters,
        random(tokens, model.hidden_size),
        random(tokens, model.heads, width),
        random(tokens, model.kv_heads, width),
        random(tokens, model.kv_heads, width),
        packed_layout(lengths),
        model,
    )


def run_layer(layer: Layer, engine: Engine = LOCAL_ENGINE, positions: Tensor | None = None) -> list[Tensor]:
    """The layer's output and, if its kind has them, the auxiliary loss of each token and what a second sublayer adds to
    x."""
    positions = layer.positions if positions is None else positions
    rope = partial(rope_cos_sin, config=layer.model.rope)
    cos, sin = rope(positions, head_dim=layer.model.head_width)
    inputs = LayerInput(
        *layer.inputs(),
        partial(apply_rope, cos=cos, sin=sin),
        layer.layout,
        engine,
        lambda x, at: apply_rope(x, *rope(at, head_dim=x.shape[-1])),
    )
    out, auxiliary = layer.kind.mix(inputs, layer.parameters)
    second = None
    if isinstance(layer.kind, TwoSublayers):
        sublayer = SublayerInput(layer.x, inputs.rotate, layer.layout, engine)
        second = layer.kind.second_sublayer(sublayer, layer.parameters)
    return [x for x in (out, auxiliary, second) if x is not None]


Results = tuple[list[Tensor], list[Tensor], dict[str, Tensor]]
"""Outputs, gradients of x, q, k and v, gradients of the parameters by name."""


def results(layer: Layer, run: Callable[[Layer], list[Tensor]] = run_layer) -> Results:
    """The outputs of `run(layer)`, the gradients of x, q, k, v, and those of the parameters, for fixed weights of the
    outputs. Inputs without influence have zeros."""
    outputs = run(layer)
    inputs, parameters = layer.inputs(), layer.named_parameters()
    leaves = [*inputs, *parameters.values()]
    grads = torch.autograd.grad(weighted_sum(outputs), leaves, allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, grads, strict=True)]
    return (
        [x.detach() for x in outputs],
        filled[: len(inputs)],
        dict(zip(parameters, filled[len(inputs) :], strict=True)),
    )


def flat(found: Results) -> list[Tensor]:
    """All its tensors."""
    outputs, inputs, parameters = found
    return [*outputs, *inputs, *parameters.values()]


def weighted_sum(outputs: list[Tensor]) -> Tensor:
    """The sum of all outputs with weights that depend on the place alone."""
    return torch.stack([(x * torch.arange(x.numel(), device=x.device).view_as(x).cos()).sum() for x in outputs]).sum()


RING_IN_PARTS = CPStrategy(4, "ring", "zigzag", 2)
"""A ring over two nodes, which attends to the keys of two ranks after those of the other two."""
STRATEGIES = [
    CPStrategy(2, "allgather", "zigzag", 2),
    CPStrategy(4, "allgather", "contiguous", 4),
    CPStrategy(2, "ulysses", "contiguous", 2),
    CPStrategy(4, "ring", "zigzag", 4),
    RING_IN_PARTS,
]


class CountingEngine(ContextParallel):
    """Counts its own calls, and the bytes of a token that its shards gather."""

    def __init__(self, strategy: CPStrategy, transport: Transport) -> None:
        super().__init__(strategy, transport)
        self.calls = 0
        self.gathered = 0

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().__call__(*arguments)

    def shard(self, layout: Layout) -> RankShard:
        shard = super().shard(layout)
        gather = shard.gather

        def counted(name: str, x: Tensor) -> Tensor:
            self.gathered += x.itemsize * math.prod(x.shape[1:])
            return gather(name, x)

        shard.gather = counted  # type: ignore[method-assign, assignment]  # of this shard alone
        return shard


def assert_ranks_equal_one_device(layer: Layer, strategy: CPStrategy, atol: float = 1e-11) -> None:
    """Output, auxiliary loss and every gradient of ranks (threads) that share the sequence are those of one device; and
    the ranks gather what the plan counts: by an engine's transport, or `TokenBytes.gathered`."""
    want_outputs, want_inputs, want_parameters = results(layer)
    transports, boards = thread_transports(strategy)
    engines = [CountingEngine(strategy, transport) for transport in transports]
    sequence = engines[0].sequence(layer.layout.total)
    places = [torch.arange(x.numel()).view_as(x).cos() for x in want_outputs]

    def rank(engine: ContextParallel) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        try:
            leaves = [sequence.shard(x.detach(), engine.rank).requires_grad_() for x in layer.inputs()]
            own = layer.with_inputs(leaves, parameters=copy.deepcopy(layer.parameters))
            outputs = run_layer(own, engine, sequence.shard(layer.positions, engine.rank))
            weights = [sequence.shard(weight, engine.rank) for weight in places]
            total = torch.stack([(x * weight).sum() for x, weight in zip(outputs, weights, strict=True)]).sum()
            parameters = list(own.named_parameters().values())
            grads = torch.autograd.grad(total, [*leaves, *parameters], allow_unused=True)
            both = zip([*leaves, *parameters], grads, strict=True)
            filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in both]
            return [x.detach() for x in outputs], filled[:4], filled[4:]
        except BaseException:
            for board in boards:
                board.barrier.abort()
            raise

    with ThreadPoolExecutor(strategy.ranks) as pool:
        futures = [pool.submit(rank, engine) for engine in engines]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    by_rank = [future.result() for future in futures]
    planned = token_bytes(layer.kind, layer.model, width=layer.k.itemsize, cp=strategy.ranks).gathered
    for engine in engines:
        assert engine.calls > 0 if planned is None else engine.gathered == planned

    def packed(shards: Iterable[Tensor]) -> Tensor:
        return sequence.to_packed(torch.cat(list(shards)))

    for index, want in enumerate(want_outputs):
        got = packed(outputs[index] for outputs, _, _ in by_rank)
        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=labelled(f"output {index}"))
    for name, index, want in zip("xqkv", range(4), want_inputs, strict=True):
        got = packed(grads[index] for _, grads, _ in by_rank)
        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=labelled(f"gradient of {name}"))
    for index, (name, want) in enumerate(want_parameters.items()):
        got = torch.stack([parameters[index] for _, _, parameters in by_rank]).sum(0)
        torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=labelled(f"gradient of {name}"))


def assert_documents_are_independent(
    name: str, options: dict[str, Any], lengths: list[int], atol: float = 1e-12
) -> None:
    """A packed sequence gives each document what it gives alone."""
    layer = make_layer(name, options, lengths)
    outputs, _, _ = results(layer)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        if not length:
            continue
        alone = [x.detach()[rows].requires_grad_() for x in layer.inputs()]
        own = layer.with_inputs(alone, layout=packed_layout([length]))
        for got, want in zip(run_layer(own), outputs, strict=True):
            torch.testing.assert_close(got, want[rows], rtol=0, atol=atol)


def token_bytes(
    kind: AttentionKind, model: ModelConfig = MODEL, *, width: int = 2, seq_len: int = 64, tokens: int = 64, cp: int = 1
) -> TokenBytes:
    """Bytes that a plan counts for each token of a layer of the kind."""
    return kind.token_bytes(model, MicroBatch(width, seq_len, tokens, cp))


def small_model(name: str, options: dict[str, Any], model: ModelConfig = MODEL) -> Transformer:
    """A float64 model whose layers are all of this kind."""
    chosen = KINDS[name].Options(**options)
    if KINDS[name].projects(chosen):
        model = model.model_copy(update={"bare_layers": "all"})
    modules = [KINDS[name].parameters(chosen, model, layer) for layer in range(model.layers)]
    transformer = Transformer(model, [{name: module} if module is not None else {} for module in modules]).double()
    initialize_weights(transformer, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in transformer.parameters():
            if not parameter.any():  # matrices of kinds that begin as zeros
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * model.init_std)
    kind = KINDS[name](chosen, model.head_width)
    transformer.set_attention([kind] * model.layers)
    return transformer


def in_16_bits(layer: Layer) -> tuple[Layer, Layer]:
    """The layer in bfloat16, and full attention to the same inputs."""
    assert layer.parameters is not None
    for parameter in layer.parameters.parameters():
        parameter.data = parameter.data.bfloat16()
    inputs = [x.detach().bfloat16().requires_grad_() for x in layer.inputs()]
    full = KINDS["full"](KINDS["full"].Options(), layer.model.head_width)
    return layer.with_inputs(inputs), layer.with_inputs(inputs, kind=full, parameters=None)


def kept_bytes(layer: Layer, shared: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors of [T, ...] that the backward pass of a layer needs, without its input, the layer's rotation
    and other `shared` ones, which other layers keep, too."""
    known = {x.untyped_storage().data_ptr() for x in (layer.x, *layer.named_parameters().values(), *shared)}
    found: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        torch.stack([x.square().sum() for x in run_layer(layer)])
    kept = [x for place, x in found.items() if place not in known and len(x) > 2]
    return sum(x.untyped_storage().nbytes() for x in kept)
