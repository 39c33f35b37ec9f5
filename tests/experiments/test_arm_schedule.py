"""Arms side by side: GPUs are shared out, time is kept, what another arm needs comes first, failures stay alone."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.figure import Arm
from experiments.models import FULL, recipe
from experiments.run_arm import check_complete
from experiments.scaling import Scaling
from experiments.schedule import gpus_for, run_arms
from experiments.stop import StoppedError, is_asked, run_to_end, stoppable
from experiments.work import arms_of, asked_for


def arm(name: str, sequences: int = 8) -> Arm:
    stages = [{"name": "train", "seq_len": 1024, "tokens": 1}]
    return Arm(name, 0, {"batch_tokens": 1024 * sequences, "stages": stages})


def test_no_gpu_has_two_arms_and_all_are_used() -> None:
    busy: list[int] = []
    most = 0
    lock = threading.Lock()
    both = threading.Barrier(2, timeout=5)

    def run(one: Arm, gpus: Sequence[int]) -> None:
        nonlocal most
        with lock:
            assert not set(gpus) & set(busy)
            busy.extend(gpus)
            most = max(most, len(busy))
        if one.name in "ab":
            both.wait()  # passes only when both run at the same time
        with lock:
            for gpu in gpus:
                busy.remove(gpu)

    outcome = run_arms([arm(name) for name in "abcd"], 2, time.monotonic() + 60, run, lambda one, gpus, sharing: 1.0)
    assert sorted(one.name for one in outcome.finished) == list("abcd")
    assert most == 2


def test_arms_share_a_gpu_where_they_may() -> None:
    together = threading.Barrier(4, timeout=5)
    places: list[tuple[int, ...]] = []

    def run(one: Arm, gpus: Sequence[int]) -> None:
        places.append(tuple(gpus))
        together.wait()  # passes only when all four run at the same time

    run_arms(
        [arm(name) for name in "abcd"], 2, time.monotonic() + 60, run, lambda one, gpus, sharing: 1.0, arms_per_gpu=2
    )
    assert sorted(places) == [(0,), (0,), (1,), (1,)]


def test_the_emptiest_gpu_is_next_and_an_arm_shares_it_only_with_those_that_can_run() -> None:
    asked: list[int] = []
    places: dict[str, Sequence[int]] = {}
    together = threading.Barrier(2, timeout=5)

    def seconds(one: Arm, gpus: int, sharing: int) -> float:
        asked.append(sharing)
        return 1.0

    def run(one: Arm, gpus: Sequence[int]) -> None:
        places[one.name] = tuple(gpus)
        if one.name != "child":
            together.wait()  # passes only when both run at the same time

    def ready(one: Arm) -> bool:
        return one.name != "child" or len(places) == 2

    run_arms([arm("child"), arm("a"), arm("b")], 2, time.monotonic() + 60, run, seconds, ready, arms_per_gpu=6)
    assert {places["a"], places["b"]} == {(0,), (1,)}
    assert set(asked) == {1}  # six could share a GPU, but only one on each is there to run


def test_an_arm_that_would_not_end_in_time_is_left_or_gets_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    used: dict[str, int] = {}

    def seconds(one: Arm, gpus: int, sharing: int) -> float:
        return {"short": 10.0, "long": 100.0, "endless": 1e6}[one.name] / max(1, gpus)

    def run(one: Arm, gpus: Sequence[int]) -> None:
        used[one.name] = len(gpus)

    arms = [arm(name) for name in ("endless", "short", "long")]
    outcome = run_arms(arms, 4, time.monotonic() + 60, run, seconds)
    assert used == {"short": 1, "long": 2}
    assert [one.name for one in outcome.left] == ["endless"]
    assert "long-seed0: begins on GPU 1, 2, about 50 s" in capsys.readouterr().out
    assert gpus_for(arm("long", sequences=1), 4, 60, seconds) is None  # one sequence cannot be shared
    assert gpus_for(arm("short"), 0, 60, seconds) == 0
    assert gpus_for(arm("long"), 4, 60, seconds) == 2
    assert gpus_for(replace(arm("long"), is_timed=True), 4, 60, seconds) is None  # a rate is that of one GPU


def test_an_arm_waits_for_the_weights_that_it_needs_and_a_failure_stays_alone() -> None:
    order: list[str] = []

    def run(one: Arm, gpus: Sequence[int]) -> None:
        if one.name == "broken":
            raise RuntimeError("no memory")
        order.append(one.name)

    arms = [arm(name) for name in ("child", "broken", "parent", "orphan")]
    ready = {"child": "parent", "orphan": "broken"}
    outcome = run_arms(
        arms,
        0,
        time.monotonic() + 60,
        run,
        lambda one, gpus, sharing: 1.0,
        lambda one: one.name not in ready or ready[one.name] in order,
    )
    assert order == ["parent", "child"]
    assert [(one.name, str(error)) for one, error in outcome.failed] == [("broken", "no memory")]
    assert [one.name for one in outcome.left] == ["orphan"]


def test_arms_run_in_the_order_of_the_patterns_and_seeds_side_by_side() -> None:
    arms = arms_of(Scaling(), [0, 1], quick=True)
    assert asked_for(arms, None) == arms
    found = [one.key for one in asked_for(arms, ["*-large", "full-*"])]
    assert found[:4] == ["full-large-seed0", "full-large-seed1", "moba-large-seed0", "moba-large-seed1"]
    assert found[4:] == [f"full-{size}-seed{seed}" for size in ("tiny", "small") for seed in (0, 1)]
    found = [one.key for one in asked_for(arms, ["moba-large-seed1", "full-t*"])]
    assert found == ["moba-large-seed1", "full-tiny-seed0", "full-tiny-seed1"]


def test_equal_arms_of_two_figures_both_run() -> None:
    ran: list[Arm] = []
    arms = [arm("a"), arm("a")]
    outcome = run_arms(
        arms, 0, time.monotonic() + 60, lambda one, gpus: ran.append(one), lambda one, gpus, sharing: 1.0
    )
    assert list(map(id, ran)) == list(map(id, arms))
    assert len(outcome.finished) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_asked_to_end_ends_its_arms_and_begins_none(tmp_path: Path, number: signal.Signals) -> None:
    began = time.monotonic()
    handler = signal.getsignal(number)
    log = tmp_path / "a.log"

    def run(one: Arm, gpus: Sequence[int]) -> None:
        if one.name == "b":
            while "begun" not in log.read_text():
                time.sleep(0.01)
            # To this thread: the main one sleeps on, as it does when a signal comes just before it falls asleep.
            signal.pthread_kill(threading.get_ident(), number)
        program = "import os, time; print('begun', os.getpid(), flush=True); time.sleep(600)"
        run_to_end([sys.executable, "-c", program], os.environ, log)

    log.touch()
    with stoppable():
        outcome = run_arms(
            [arm(name) for name in "abc"],
            2,
            began + 1e6,
            run,
            lambda one, gpus, sharing: 1.0,
            label=lambda one: one.name,
        )
        assert is_asked()
    assert sorted(one.name for one in outcome.left) == list("abc"), "the same command goes on with them"
    assert (outcome.finished, outcome.failed) == ([], [])
    assert time.monotonic() - began < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text().split()[1]), 0)
    assert signal.getsignal(number) == handler
    assert not is_asked(), "a later call runs"


def test_a_program_runs_to_its_end_and_its_output_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_to_end([sys.executable, "-c", "import sys; print('said'); sys.exit(3)"], os.environ, log) == 3
    assert log.read_text() == "said\n"


def test_a_program_that_the_same_signal_ends_with_status_0_is_not_finished(tmp_path: Path) -> None:
    """Ctrl-C reaches the trainer as well, which then ends in order."""
    program = f"import os, signal; os.kill({os.getpid()}, signal.SIGINT)"
    with stoppable(), pytest.raises(StoppedError):
        run_to_end([sys.executable, "-c", program], os.environ, tmp_path / "log")


@pytest.mark.parametrize(
    ("stage", "step", "until", "began", "complete"),
    [
        ("long", 8, "", 4, True),
        ("long", 7, "", 4, False),
        ("short", 4, "", 0, False),
        ("long", 7, "long", 4, True),
        ("short", 4, "long", 0, False),
        ("long", 8, "short", 4, True),
        ("long", 8, "short", 6, False),  # the stage before ended two steps later than planned
    ],
)
def test_training_that_was_asked_to_stop_is_no_result(
    stage: str, step: int, until: str, began: int, complete: bool
) -> None:
    stages: list[dict[str, Any]] = [{"name": name, "seq_len": 16, "tokens": 512} for name in ("short", "long")]
    for one in stages:
        if one["name"] == until:
            one["until"] = {"metric": "eval_loss", "at_most": 1.0, "max_tokens": 1024}
    whole = Arm("a", 0, recipe("tiny", FULL, 16, 1024, 128, {}, stages=stages))
    records: list[dict[str, Any]] = [
        {"type": "stage", "stage": stage, "step": began},
        {"type": "metrics", "stage": stage, "step": step},
        {"type": "validation_loss"},
    ]
    with nullcontext() if complete else pytest.raises(RuntimeError, match=f"asked to stop after step {step} of"):
        check_complete(whole, records)
