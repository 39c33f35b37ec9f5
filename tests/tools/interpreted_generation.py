"""Repeated launches of new tokens, in Triton's interpreter: a record that keeps what the host knew, as a CUDA graph
does, and refuses what it cannot hold."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from moba_train.attention.full import FullAttention
from moba_train.attention.registry import KINDS
from moba_train.config.model import RopeConfig
from moba_train.model.transformer import Transformer
from moba_train.tools.inference.cache import CachedAttention, CachePlan, Decode
from moba_train.tools.inference.graph import Record, RepeatedToken
from moba_train.torch_private import TorchDispatchMode
from tests.attention.kind_checks import MODEL, small_model
from tests.attention.quick_interpreter import quicken

quicken()

PROMPT, STEPS = 121, 10
OPTIONS = {"block_size": 64, "topk": 2}


class WithoutTheHost(TorchDispatchMode):
    """Refuses tensors that are made of the host's numbers, that the host reads, or that are as long as values say: a
    CUDA graph holds none of them."""

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        name = operator.overloadpacket.__name__
        assert name not in {"lift_fresh", "_local_scalar_dense", "nonzero", "masked_select"}, name
        return operator(*arguments, **(named or {}))


def frozen(plan: CachePlan, repeats: list[int]) -> Record:
    """Repeats a call with the plan's numbers of the time of the record."""

    def record(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        recorded = list(plan.lengths)
        with WithoutTheHost():
            result = call()

        def repeat() -> None:
            repeats.append(plan.lengths[0])
            plan.lengths, now = list(recorded), plan.lengths
            result.copy_(call())
            plan.lengths = now

        return repeat, result

    return record


def two_layers() -> Transformer:
    """A layer of MoBA and one of full attention, in float16: in bfloat16 the interpreter's arithmetic is wrong."""
    model = small_model("moba", OPTIONS, MODEL.model_copy(update={"head_dim": 64, "init_std": 0.15})).half()
    moba = model.attention_kinds()[0]
    model.set_attention([moba, KINDS["full"](FullAttention.Options(), 64)])
    return model


@torch.no_grad()
def logits_of(model: Transformer, tokens: Tensor, decode: Decode, repeats: list[int] | None) -> Tensor:
    """Logits [STEPS, V] behind each token after the prompt."""
    plan = CachePlan([len(tokens)], torch.device("cpu"))
    model.set_engines([CachedAttention(plan, decode, kind) for kind in model.attention_kinds()])
    repeated = RepeatedToken(model, plan, frozen(plan, repeats if repeats is not None else []))
    plan.read(0, PROMPT)
    model(tokens[:PROMPT], torch.arange(PROMPT), plan.layout)
    found = []
    for place in range(PROMPT, len(tokens)):
        logits_V = repeated(0, int(tokens[place])) if repeats is not None else None
        if logits_V is None:
            plan.decode([0])
            logits_V = model(tokens[place : place + 1], torch.tensor([place]), plan.layout)[0]
        found.append(logits_V.clone())
    return torch.stack(found)


@pytest.mark.parametrize("decode", ["own", "full"])
def test_repeated_tokens_have_the_bits_of_tokens_that_run_as_written(decode: Decode) -> None:
    model = two_layers()
    tokens = torch.randint(0, 50, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(5))
    repeats: list[int] = []
    got = logits_of(model, tokens, decode, repeats)
    assert got.equal(logits_of(model, tokens, decode, None))
    # Behind the prompt one token runs as written; 128 ends a unit and 129 begins one.
    assert repeats == [*range(123, 128), *range(130, PROMPT + STEPS + 1)]


LONGROPE = RopeConfig(kind="longrope", factor=2, original_seq_len=8, seq_len=16, long_factors=(2.0,) * 32)


@pytest.mark.parametrize(
    ("name", "options", "other"),
    [
        ("moba", {**OPTIONS, "key_conv": 3}, {}),
        ("moba", {**OPTIONS, "backend": "reference"}, {}),
        ("window", {"window": 9}, {}),
        ("moba", OPTIONS, {"rope": LONGROPE}),
    ],
)
@torch.no_grad()
def test_what_needs_the_host_is_never_recorded(name: str, options: dict[str, Any], other: dict[str, Any]) -> None:
    model = small_model(name, options, MODEL.model_copy(update={"head_dim": 64, **other})).half()
    plan = CachePlan([9], torch.device("cpu"))
    model.set_engines([CachedAttention(plan, "own", kind) for kind in model.attention_kinds()])

    def refuse(_call: Callable[[], Tensor]) -> NoReturn:
        raise AssertionError("recorded")

    repeated = RepeatedToken(model, plan, refuse)
    plan.read(0, 3)
    model(torch.arange(3), torch.arange(3), plan.layout)
    for place in range(3, 9):
        assert repeated(0, 7) is None
        plan.decode([0])
        model(torch.tensor([7]), torch.tensor([place]), plan.layout)
