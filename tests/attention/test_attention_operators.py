"""Attention inside torch.compile and under activation checkpointing: equal numbers, one selection."""

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moba_train.attention import handles
from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.attention.full import FullAttention
from moba_train.attention.full.full_kind import FullKind
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_kind import MobaKind
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.operators import SAVED_OPERATORS, _operator
from moba_train.attention.protocol import LocalAttention
from moba_train.config.model import ModelConfig
from moba_train.model.build import initialize_weights
from moba_train.model.transformer import Transformer
from tests.attention.helpers import triple
from tests.attention.kind_checks import small_model

LENGTHS = [37, 0, 1, 90]
KINDS: dict[str, LocalAttention] = {
    "full": FullAttention(FullAttention.Options(backend="reference"), 16),
    "moba": MobaAttention(MobaAttention.Options(block_size=16, topk=3, backend="reference"), 16),
    "moba-flash": MobaAttention(MobaAttention.Options(block_size=16, topk=3, backend="composed"), 16),
}


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(128, 4, 16), (128, 2, 16), (128, 2, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def numbers(run: object, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv of a function of (q, k, v)."""
    out, lse = run(q, k, v)  # type: ignore[operator]  # any callable
    return [out, lse, *torch.autograd.grad(out.square().sum(), (q, k, v))]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_compiled_whole_it_gives_the_same_bits(kind: LocalAttention) -> None:
    """`fullgraph` refuses graph breaks; a second length must not need the selection's shapes to be known beforehand."""

    def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        return LOCAL_ENGINE(q * 1.5, k, v, kind, layout)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, [128], [64, 64]):
        layout = packed_layout(lengths)
        expected = numbers(partial(run, layout=layout), *inputs())
        for ours, theirs in zip(numbers(partial(compiled, layout=layout), *inputs()), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_recomputation_keeps_the_plan_and_the_attention(kind: LocalAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the checkpointing that FSDP uses, select and attend run once: near-ties cannot fall differently."""
    calls = []
    for name in ("select", "attend", "attend_backward"):
        method = getattr(type(kind), name)

        def spy(self: LocalAttention, *args: object, name: str = name, method: object = method) -> object:
            calls.append(name)
            return method(self, *args)  # type: ignore[operator]  # the method it replaces

        monkeypatch.setattr(type(kind), name, spy)

    layout = packed_layout(LENGTHS)
    plain = numbers(lambda q, k, v: LOCAL_ENGINE(q * 1.5, k, v, kind, layout), *inputs())
    calls.clear()
    contexts = partial(create_selective_checkpoint_contexts, list(SAVED_OPERATORS))

    def recomputed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        run = lambda q, k, v: LOCAL_ENGINE(q * 1.5, k, v, kind, layout)  # noqa: E731
        return checkpoint(run, q, k, v, use_reentrant=False, context_fn=contexts)

    for ours, theirs in zip(numbers(recomputed, *inputs()), plain, strict=True):
        assert torch.equal(ours, theirs)
    assert calls == ["select", "attend", "attend_backward"]


def test_handles_say_what_compiled_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps compiled code on disk and finds it by such handles: other options must not be given that code."""

    def first_handle(options: MobaAttention.Options, head_dim: int) -> str:
        """The handle in a process whose first attention this is."""
        monkeypatch.setattr(handles, "_numbers", itertools.count())
        return MobaAttention(options, head_dim).handle

    settings = [(MobaAttention.Options(topk=topk), head_dim) for topk, head_dim in ((3, 16), (4, 16), (3, 32))]
    found = [first_handle(*setting) for setting in settings]
    assert len(set(found)) == 3
    assert "topk=4" in found[1]
    assert found == [first_handle(*setting) for setting in settings]
    built = first_handle(MobaAttention.Options(block_size=96, topk=7), 16)
    assert "block_size=96" in built
    assert "topk=7" in built


def test_an_attention_replaced_before_the_backward_pass_still_gives_its_own_gradients() -> None:
    config = ModelConfig(vocab_size=31, hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=1)
    model = Transformer(config)
    initialize_weights(model, 0)
    tokens, positions = torch.arange(30), torch.arange(30)

    def gradient(replace: bool) -> Tensor:
        model.zero_grad()
        model.set_attention([MobaKind(MobaKind.Options(block_size=4, topk=2), 16)])
        logits = model(tokens, positions, packed_layout([30]))
        if replace:
            model.set_attention([FullKind(FullKind.Options(), 16)])
        logits.square().sum().backward()
        gradient = model.embedding.weight.grad
        assert gradient is not None
        return gradient.clone()

    assert torch.equal(gradient(replace=True), gradient(replace=False))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("memory", ["heads first", "every other number"])
def test_any_strides_are_taken_and_contiguous_results_come_back(kind: LocalAttention, memory: str) -> None:
    """As the operators tell torch.compile: the code it generates asserts the strides of every result."""

    def strided(x: Tensor) -> Tensor:
        if memory == "heads first":
            return x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
        return x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()

    layout = packed_layout(LENGTHS)
    plain, ours = inputs(), [strided(x) for x in inputs()]
    got, expected = (numbers(lambda *x: LOCAL_ENGINE(*triple(x), kind, layout), *leaves) for leaves in (ours, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    results = _operator(*ours, None, None, *(layout.cu_seqlens, None, 90, 128, None), kind.handle, LOCAL_ENGINE.handle)
    grads = torch.autograd.grad(results[0].square().sum(), ours)
    assert all(x.is_contiguous() for x in (*results[:2], *results[2], *grads))


def test_kernels_are_given_heads_whose_numbers_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention and cuDNN take any strides but that of the last dimension."""
    seen: list[int] = []
    attend = FullAttention.attend

    def watched(self: FullAttention, *tensors: Tensor, **rest: object) -> tuple[Tensor, Tensor]:
        seen.extend(x.stride(-1) for x in tensors[:3])
        return attend(self, *tensors, **rest)  # type: ignore[arg-type]  # the method it replaces

    monkeypatch.setattr(FullAttention, "attend", watched)
    LOCAL_ENGINE(*triple(x.repeat_interleave(2, -1)[..., ::2] for x in inputs()), KINDS["full"], packed_layout([128]))
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_autocast_changes_nothing(kind: LocalAttention) -> None:
    """Dtypes are the caller's: autocast must not round the float32 sums inside, and less so in one of both passes."""
    layout = packed_layout(LENGTHS)

    def run(enabled: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return numbers(
                lambda *x: LOCAL_ENGINE(*triple(x), kind, layout),
                *(x.detach().float().requires_grad_() for x in inputs()),
            )

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_second_derivatives_are_refused_clearly() -> None:
    q, k, v = inputs()
    out, _ = LOCAL_ENGINE(q, k, v, KINDS["moba"], packed_layout(LENGTHS))
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"attention: .*second derivative"):
        dq.sum().backward()


class Seen(TorchDispatchMode):
    """Inside, notes the names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.names.append(operator.name())
        return operator(*arguments, **(named or {}))


class Awaited(Tensor):
    """A tensor whose numbers only operators may ask for, as one that is still on its way from other ranks."""

    arrived: Tensor
    seen: list[str]

    @staticmethod
    def __new__(cls, x: Tensor, seen: list[str]) -> "Awaited":
        made: Awaited = Tensor._make_wrapper_subclass(cls, x.shape, strides=x.stride(), dtype=x.dtype)
        made.arrived, made.seen = x, seen
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stub has no defaults
        cls, operator: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        for x in arguments:
            if isinstance(x, Awaited):
                x.seen.append(operator.name())
        return operator(*(x.arrived if isinstance(x, Awaited) else x for x in arguments), **(named or {}))


def test_what_watches_operators_sees_attention_and_nothing_else_needs_them() -> None:
    layout, kind = packed_layout(LENGTHS), KINDS["moba"]
    run = partial(LOCAL_ENGINE, attention=kind, layout=layout)
    want = numbers(run, *inputs())
    with Seen() as seen:
        got = numbers(run, *inputs())
    assert {"moba_train::attention", "moba_train::attention_backward"} <= {*seen.names}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    asked: list[str] = []
    q, k, v = (x.detach() for x in inputs())
    assert torch.equal(run(Awaited(q, asked), k, v)[0], want[0])
    assert asked == ["moba_train::attention"]


@pytest.mark.gpu
def test_kernels_run_where_the_tensors_are_not_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    kind = MobaAttention(MobaAttention.Options(block_size=64, topk=2), 64)

    def run(device: str) -> list[Tensor]:
        qkv = [x.detach().repeat(3, 1, 4).to(device, torch.bfloat16).requires_grad_() for x in inputs()]
        return numbers(lambda *x: LOCAL_ENGINE(*triple(x), kind, packed_layout([384], device)), *qkv)

    with torch.cuda.device(0):
        for there, here in zip(run("cuda:1"), run("cuda:0"), strict=True):
            assert torch.equal(there.cpu(), here.cpu())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_needs_nothing_of_the_first(copied: Callable[[Transformer], Transformer]) -> None:
    """Operators find attentions and engines by handles, which a copy must not share."""
    model = small_model("moba", {"block_size": 4, "topk": 2})
    inputs = torch.arange(10), torch.arange(10), packed_layout([10])
    want = model(*inputs)
    other = copied(model)
    handles = {kind.attentions[0].handle for kind in model.attention_kinds()}
    assert handles.isdisjoint(kind.attentions[0].handle for kind in other.attention_kinds())
    del model
    gc.collect()
    assert torch.equal(other(*inputs), want)
