"""The slowest rank is found by the time between meetings and by the time in attention."""

from types import SimpleNamespace

import pytest
import torch

from moba_train.attention.engine import LOCAL_ENGINE
from moba_train.health import watch as stragglers
from moba_train.health.watch import Stragglers


def test_the_longest_times_are_compared_with_the_mean_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every third step. How long a rank waits for the others in a meeting is no part of its own time."""
    clock = [100.0]
    own: list[list[float]] = []

    def ranks(values: list[float]) -> list[list[float]]:
        own.append(values)
        return [[2.0, 0.75], [3.0, 0.25], [4.0, 0.5]]

    monkeypatch.setattr(stragglers, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(stragglers, "gather_over_ranks", ranks)
    compared = Stragglers(3, torch.device("cpu"))
    found = []
    for step in range(1, 7):
        clock[0] += step
        with compared.meeting():
            clock[0] += 50.0
        with compared.attention(step, LOCAL_ENGINE):
            pass
        found.append(compared.metrics(step))
    metrics = {
        "attention_s": 0.5,
        "straggler_step": 4 / 3,
        "straggler_step_rank": 2.0,
        "straggler_attention": 1.5,
        "straggler_attention_rank": 0.0,
    }
    assert found == [{}, {}, metrics, {}, {}, metrics]
    assert own == [[3.0, 0.0], [6.0, 0.0]]


def test_a_rank_alone_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "gather_over_ranks", lambda values: [values])
    compared = Stragglers(1, torch.device("cpu"))
    with compared.attention(1, LOCAL_ENGINE):
        pass
    assert compared.metrics(1) == {"attention_s": 0.0}
