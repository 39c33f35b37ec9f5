"""Observers of an engine: they see every local function while they observe, and change no number."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moba_train.attention.engine import OperatorEngine
from moba_train.attention.layout import Layout, packed_layout
from moba_train.attention.moba.moba_local import MobaAttention
from moba_train.attention.observer import Observer, observing
from moba_train.health.watch import AttentionTimer
from tests.attention.helpers import make_qkv

FUNCTIONS = ["summarize", "select", "selected", "attend", "attended", "attend_backward"]


class Recorder(Observer):
    def __init__(self) -> None:
        self.seen: list[str] = []
        self.running: list[str] = []

    @contextmanager
    def around(self, function: str) -> Iterator[None]:
        self.running.append(function)
        yield
        self.seen.append(self.running.pop())

    def selected(self, attention: Any, selection: Any, layout: Layout) -> None:
        assert not self.running, "describing a selection is not timed with it"
        self.seen.append("selected")

    def attended(self, call: Any, out: torch.Tensor, lse: torch.Tensor) -> None:
        assert not self.running
        self.seen.append("attended")


@pytest.fixture
def attention() -> MobaAttention:
    return MobaAttention(MobaAttention.Options(block_size=4, topk=2), 8)


def both_passes(engine: OperatorEngine, attention: MobaAttention) -> list[torch.Tensor]:
    qkv = make_qkv(30, 2, 1, 8)
    out, lse = engine(*qkv, attention, packed_layout([30]))
    return [out, lse, *torch.autograd.grad(out.sum(), qkv)]


def test_every_observer_sees_every_function_while_it_observes(attention: MobaAttention) -> None:
    engine, one, other = OperatorEngine(), Recorder(), Recorder()
    plain = both_passes(engine, attention)
    with observing(engine, one) as same, observing(engine, other):
        observed = both_passes(engine, attention)
    assert same is one
    assert one.seen == other.seen == FUNCTIONS
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    both_passes(engine, attention)
    assert one.seen == FUNCTIONS
    assert engine.observers == ()


def test_an_observer_of_one_engine_sees_nothing_of_another(attention: MobaAttention) -> None:
    recorder = Recorder()
    with observing(OperatorEngine(), recorder):
        both_passes(OperatorEngine(), attention)
    assert recorder.seen == []


def test_the_timer_adds_up_the_local_functions(attention: MobaAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OperatorEngine()
    attend = MobaAttention.attend

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return attend(*arguments)

    monkeypatch.setattr(MobaAttention, "attend", slow)
    began = time.perf_counter()
    with observing(engine, AttentionTimer(torch.device("cpu"))) as timer:
        both_passes(engine, attention)
    assert 0.05 <= timer.seconds() <= time.perf_counter() - began
