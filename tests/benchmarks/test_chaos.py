"""The chaos suite in short: a run that is killed, starved of disk, damaged and told to end does not care."""

import os
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest

from benchmarks import chaos_disturbances
from benchmarks.chaos import Chaos, plan
from benchmarks.chaos_actions import ACTIONS, KILLS
from benchmarks.chaos_disturbances import Disturbance
from benchmarks.chaos_run import ChaosRun
from benchmarks.chaos_tally import Tally
from tests.forked_program import ForkedProgram


class Agent(ForkedProgram):
    """The agent of `chaos_launch`, without the imports of its start."""

    stdout: TextIO


def start_agent(run: ChaosRun, arguments: list[str], environment: dict[str, str]) -> Agent:
    """In place of `ChaosRun._start`."""
    output = run.folder / f"output{run.launches}"
    os.mkfifo(output)
    agent = Agent(arguments, output, **environment)
    agent.stdout = output.open(errors="replace")
    return agent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_a_disturbed_run_ends_bitwise_where_an_undisturbed_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChaosRun, "_start", start_agent)
    kinds = ["kill_rank", "disk_full", "flipped_byte", "sigterm_rank"]
    chaos = Chaos(kinds, tmp_path, seed=0, fork=True, steps=24)
    chaos.work()
    tally = chaos.tally
    assert tally.failures == []
    assert tally.ended_bitwise_equal == tally.runs >= 1
    assert tally.disturbances == Counter(kinds)


def test_the_long_form_has_as_many_kills_as_asked_and_every_other_kind() -> None:
    kinds = Counter(plan(100, random.Random(0)))
    assert sum(kinds[kind] for kind in KILLS) == 100
    assert kinds.keys() == ACTIONS.keys()


@pytest.mark.parametrize("kind", ["sigterm_rank", "stall_rank"])
def test_a_run_whose_ranks_end_before_they_are_disturbed_was_not_disturbed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disturbance, "_moment", lambda _disturbance: True)
    monkeypatch.setattr(chaos_disturbances, "ranks_of", lambda _launcher: [])
    run = SimpleNamespace(saved_step=4, starts=list, lines=[], launcher=SimpleNamespace(pid=0))
    tally = Tally(runs=1)
    assert not Disturbance(kind, ACTIONS[kind], run, random.Random(0), tally).apply()  # type: ignore[arg-type]
    assert not tally.disturbances
