"""What blocks keep changes memory and time, never a bit of the loss or of a gradient."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from moba_train.attention import operators
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.config.model import ModelConfig
from moba_train.model.build import build_attention, initialize_weights
from moba_train.model.feed_forward import FeedForward
from moba_train.model.transformer import Transformer
from moba_train.parallel.activations import (
    Kept,
    LayerActivations,
    describe_activations,
    set_activations,
    wrap_blocks,
)
from moba_train.parallel.offload import HostMemory, buffer_bytes

TOKENS, HEADS = 48, 4
MODEL = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=80, layers=2, heads=HEADS, kv_heads=2)
KEYS = 16
"""Width of all keys of a token."""
CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {
    "moba": {"block_size": 8, "topk": 3},
    "seer": {"block_size": 8, "topk": 2},
    "nsa": {"compressed_block": 4, "stride": 2, "block_size": 4, "topk": 4, "window": 8},
}
POLICIES = [LayerActivations(kept, on_host) for kept in reversed(Kept) for on_host in (False, True)]


def model_of(*names: str, compiled: bool = False) -> Transformer:
    """A layer of each kind; `seer` is trained, with its auxiliary loss."""
    layers = [LayerAttention(name, KINDS[name].Options.model_validate(OPTIONS.get(name, {}))) for name in names]
    config = MODEL.model_copy(update={"layers": len(names)})
    parameters = [KINDS[name].parameters(layer.options, config, 0) for name, layer in zip(names, layers, strict=True)]
    modules = [{} if own is None else {name: own} for name, own in zip(names, parameters, strict=True)]
    model = Transformer(config, modules)
    initialize_weights(model, seed=0)
    model.set_attention(build_attention(layers, config.head_width))
    wrap_blocks(model, compiled)
    return model


def step(model: Transformer, ranks: int = 1) -> list[Tensor]:
    """Loss and all gradients on two packed documents, twice: the second pass reuses the host's buffers. `ranks`: that
    share the sequence, with TOKENS rows on each."""
    layout = packed_layout([20, ranks * TOKENS - 20])
    tokens = torch.arange(TOKENS) * 7 % MODEL.vocab_size
    rows = torch.arange(TOKENS)
    model.zero_grad()
    for _ in range(2):
        loss = model.loss(tokens, rows, layout, (tokens.roll(-1), rows, torch.ones(TOKENS))).total
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_same_bits(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of attention, forward and backward alike, and elements that went to the host and came back."""
    found: Counter[str] = Counter()
    call, copy_out, copy_back = operators.observed, HostMemory.copy_out, HostMemory.copy_back

    def counted_call(*arguments: Any) -> Any:
        found["attention"] += 1
        return call(*arguments)

    def counted_copy(memory: HostMemory, tensor: Tensor) -> Any:
        found["sent"] += tensor.numel()
        return copy_out(memory, tensor)

    def counted_return(memory: HostMemory, copies: list[Tensor]) -> Any:
        found["returned"] += sum(copy.numel() for copy in copies)
        return copy_back(memory, copies)

    monkeypatch.setattr(operators, "observed", counted_call)
    monkeypatch.setattr(HostMemory, "copy_out", counted_copy)
    monkeypatch.setattr(HostMemory, "copy_back", counted_return)
    return found


def test_every_policy_gives_the_same_bits_and_attention_is_not_recomputed(calls: Counter[str]) -> None:
    assert_policies_give_the_same_bits(calls, "moba", "full", "full")


def assert_policies_give_the_same_bits(calls: Counter[str], *names: str) -> None:
    """Whatever three layers of these kinds keep, uncompiled, they compute the same and do not repeat attention."""
    model = model_of(*names)
    set_activations(model, [LayerActivations(Kept.ALL)] * 3, CPU)
    wanted = step(model)
    once = calls["attention"]
    for policy in POLICIES[1:]:
        calls.clear()
        set_activations(model, [policy] * 3, CPU)
        assert_same_bits(step(model), wanted)
        assert calls["attention"] == once + (2 * 3 if policy.kept is Kept.INPUT else 0), policy
        assert (calls["sent"] > 0) == policy.on_host
        assert calls["returned"] <= calls["sent"], "each tensor once at most"


def test_a_policy_recomputes_the_products_that_it_does_not_keep() -> None:
    """Counted in the backward pass of two layers, for each of them."""
    model = model_of("full", "full")
    counts: list[int] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, arguments: Any = (), options: Any = None) -> Any:
            counts[-1] += function is torch.ops.aten.mm.default
            return function(*arguments, **(options or {}))

    tokens = torch.arange(TOKENS)
    layout = packed_layout([20, TOKENS - 20])
    for kept in reversed(Kept):
        set_activations(model, [LayerActivations(kept)] * 2, CPU)
        loss = model.loss(tokens, tokens, layout, (tokens, tokens, torch.ones(TOKENS))).total
        counts.append(0)
        with Products():
            loss.backward()
    # No product; those of the feed-forward; those of attention as well.
    assert [count - counts[0] for count in counts] == [0, 0, 2 * 2, 2 * (2 + 4), 2 * (2 + 4)]


def test_sizes_of_documents_are_symbols_next_to_what_the_user_has_named() -> None:
    """However many models are compiled."""
    fields = ",".join(f"L['layout'].{name}" for name in ("cu_seqlens", "cu_seqlens_cpu", "max_seqlen"))
    for asked, wanted in (("", fields), ("L['mine']", f"L['mine'],{fields}")):
        with torch.compiler.config.patch(dynamic_sources=asked):  # type: ignore[attr-defined]  # added at import
            for _ in range(2):
                model_of("moba", compiled=True)
                assert torch.compiler.config.dynamic_sources == wanted


def test_compiled_blocks_keep_what_the_policy_names_and_nothing_else(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by what is sent to the host, for each token of both layers; the policy changes without a reset."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # its tracing, without its code
    model = model_of("moba", "moba", compiled=True)
    set_activations(model, [LayerActivations(Kept.ALL)] * 2, CPU)
    wanted = step(model)
    once = calls["attention"]
    hidden = queries = MODEL.hidden_size
    selected = HEADS * 2  # MoBA's blocks; its inverse lists are not by token
    added = {
        Kept.INPUT: 2 * hidden,
        Kept.ATTENTION: 2 * (queries + HEADS + selected),
        Kept.PROJECTIONS: 2 * (queries + 2 * KEYS + hidden),
        Kept.PRODUCTS: 2 * 2 * MODEL.intermediate_size,
    }
    for kept in reversed(added):
        calls.clear()
        set_activations(model, [LayerActivations(kept, on_host=True)] * 2, CPU)
        assert_same_bits(step(model), wanted)
        assert calls["attention"] == once + (2 * 2 if kept is Kept.INPUT else 0)
        assert calls["sent"] == 2 * TOKENS * sum(added[level] for level in added if level <= kept)


def test_a_feed_forward_in_parts_is_the_whole_one_up_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 20, 20 and 8 rows where its products are recomputed; compiled, the same bits as uncompiled."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    wanted = step(model_of("moba", "full"))
    monkeypatch.setattr("moba_train.parallel.activations.FEED_FORWARD_ROWS", 20)
    sizes: list[int] = []
    taking = FeedForward.forward

    def counted(self: FeedForward, x_TD: Tensor) -> Tensor:
        sizes.append(len(x_TD))
        return taking(self, x_TD)

    monkeypatch.setattr(FeedForward, "forward", counted)
    found = []
    for compiled, kept in ((False, Kept.ATTENTION), (True, Kept.ATTENTION), (False, Kept.PRODUCTS)):
        model = model_of("moba", "full", compiled=compiled)
        set_activations(model, [LayerActivations(kept)] * 2, CPU)
        sizes.clear()
        found.append(step(model))
        if not compiled:
            assert set(sizes) == ({8, 20} if kept is Kept.ATTENTION else {TOKENS})
    assert_same_bits(found[0], found[1])
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-6)
    assert_same_bits(found[2], wanted)  # its products are kept, so it takes all rows at once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_saved_tensor_comes_back_as_it_was_as_often_as_it_is_asked_for(dtype: torch.dtype) -> None:
    memory = HostMemory(CPU)
    saved = torch.arange(24).reshape(4, 6).to(dtype).t()
    weight, part = torch.ones(6, 6).to(dtype), torch.ones(6, 9).to(dtype)[:, :4]
    held: list[Any] = []

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(saved, weight, part)
            held.append(ctx)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    with memory.holding_rows(saved.numel(), [weight]):
        held.append(Hold.apply(torch.zeros((), requires_grad=True)))  # alive, so that its graph is
    memory._settle(unsettled=0)
    returned: list[Tensor] = []
    for _ in range(2):
        again, same, view = held[0].saved_tensors
        returned.append(again)
        assert torch.equal(again, saved)
        assert (again.dtype, again.stride()) == (dtype, saved.stride())
        assert again.data_ptr() != saved.data_ptr()
        assert (same.data_ptr(), view.data_ptr()) == (weight.data_ptr(), part.data_ptr()), "these stay where they are"
    assert returned[0].data_ptr() != returned[1].data_ptr(), "the device's memory is the caller's, and not kept"


def test_buffers_have_few_sizes_and_waste_an_eighth_at_most() -> None:
    """Tables of attention have another size in each batch: buffers of just these sizes would never be used again."""
    counts = range(100_000, 200_000, 48)
    sizes = {buffer_bytes(count) for count in counts}
    assert len(sizes) < 20
    assert all(count <= buffer_bytes(count) <= 1.125 * count for count in counts)
    assert buffer_bytes(2**31) == 2**31


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kept", [Kept.ALL, Kept.ATTENTION])
def test_what_was_sent_is_freed_but_for_the_last_block(
    compiled: bool, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a block computes, of all tensors on their way to the host those of the block before exist at most."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = model_of("moba", "moba", "moba", "moba", compiled=compiled)
    set_activations(model, [LayerActivations(kept, on_host=True)] * 4, CPU)
    step(model)
    sent: list[list[StorageWeakRef]] = []  # by block
    alive: list[list[int]] = []
    copy_out, holding_rows = HostMemory.copy_out, HostMemory.holding_rows

    def noted_copy(memory: HostMemory, tensor: Tensor) -> Any:
        sent[-1].append(StorageWeakRef(tensor.untyped_storage()))
        return copy_out(memory, tensor)

    @contextmanager
    def noted_block(memory: HostMemory, rows: int, others: Iterable[Tensor]) -> Iterator[None]:
        sent.append([])
        with holding_rows(memory, rows, others):
            alive.append([sum(not reference.expired() for reference in block) for block in sent[:-1]])
            yield

    monkeypatch.setattr(HostMemory, "copy_out", noted_copy)
    monkeypatch.setattr(HostMemory, "holding_rows", noted_block)
    tokens = torch.arange(TOKENS)
    loss = model.loss(tokens, tokens, packed_layout([20, TOKENS - 20]), (tokens, tokens, torch.ones(TOKENS))).total
    assert [len(counts) for counts in alive] == [0, 1, 2, 3]
    assert all(counts[-1] for counts in alive[1:]), "the copies of the block before may be under way"
    assert not any(any(counts[:-1]) for counts in alive[1:])
    loss.backward()


def _allocated(device: str) -> int:
    """Bytes of GPU memory that are allocated, of which `_peak` is the most from here on; 0 on the CPU."""
    if device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    """The most bytes of GPU memory that were allocated since `_allocated`; 0 on the CPU."""
    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


@pytest.mark.parametrize(("device", "width"), [("cpu", 64), pytest.param("cuda", 4096, marks=pytest.mark.gpu)])
def test_memory_that_was_sent_is_used_again_while_its_copies_travel(device: str, width: int) -> None:
    """Twelve layers, three passes: the host is ahead of the GPU, and each layer's memory may be the next but one's."""
    generator = torch.Generator(device).manual_seed(0)
    scale = width**-0.5
    weights = [torch.randn(width, width, generator=generator, device=device) * scale for _ in range(12)]
    x_TD = torch.randn(width, width, generator=generator, device=device)

    def gradients(memory: HostMemory | None) -> tuple[list[Tensor], int]:
        """The weights' gradients of three passes, and the most GPU memory that a forward pass added, in bytes: in a
        backward pass gradients take the place of activations."""
        found: list[Tensor] = []
        most = 0
        for _ in range(3):
            before = _allocated(device)
            trained = [weight.clone().requires_grad_() for weight in weights]
            y_TD = x_TD
            for weight in trained:
                with nullcontext() if memory is None else memory.holding_rows(width, [weight]):
                    y_TD = torch.tanh(y_TD @ weight)
            most = max(most, _peak(device) - before)
            y_TD.square().sum().backward()
            found += [weight.grad for weight in trained if weight.grad is not None]
        return found, most

    (sent, less), (kept, more) = gradients(HostMemory(torch.device(device))), gradients(None)
    assert len(sent) == 3 * len(weights)
    assert_same_bits(sent, kept)
    if device == "cuda":
        assert more - less > 6 * x_TD.nbytes


def test_a_block_s_tensors_are_on_their_way_before_its_backward_pass(calls: Counter[str]) -> None:
    memory = HostMemory(CPU)
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
    with memory.holding_rows(8, weights):
        hidden = torch.tanh(torch.randn(8, 8) @ weights[0])
    with memory.holding_rows(8, weights):
        out = torch.tanh(hidden @ weights[1])
    returned: list[int] = []
    hidden.register_hook(lambda _gradient: returned.append(calls["returned"]))
    out.sum().backward()
    assert returned == [calls["sent"]]
    assert calls["sent"] > 0


def test_hooks_around_a_model_see_what_its_blocks_do_not_send() -> None:
    """Offload is the blocks' own: the embedding, the norm and the loss save as always."""
    model = model_of("full", "full")
    seen: list[int] = []
    for on_host in (False, True):
        set_activations(model, [LayerActivations(Kept.ALL, on_host)] * 2, CPU)
        shapes: list[torch.Size] = []

        def noted(tensor: Tensor, into: list[torch.Size] = shapes) -> Tensor:
            into.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(noted, lambda tensor: tensor):
            step_loss = model(
                torch.arange(TOKENS), torch.arange(TOKENS), Layout(torch.tensor([0, TOKENS]), TOKENS, TOKENS)
            )
        assert step_loss.requires_grad
        seen.append(len(shapes))
    assert 0 < seen[1] < seen[0]


def test_the_policy_is_told_in_ranges_of_layers() -> None:
    layers = [LayerActivations(Kept.ATTENTION, on_host=True)] * 2 + [LayerActivations(Kept.ALL)]
    assert describe_activations(layers) == (
        "layers 0-1: attention's result kept (in host memory); layer 2: nothing recomputed"
    )
