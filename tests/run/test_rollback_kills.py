"""Rank 0 killed around a rollback: the run that starts again ends with the bits, counters and records of one that was
never killed.

    MOBA_ROLLBACK_KILLS=200 python -m pytest tests/run/test_rollback_kills.py    # half at every point, half at any time
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moba_train.checkpoint import publish, retention, writer
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.process_group import SaveGroup
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.progress import Progress
from moba_train.run.recovery import Recovery
from moba_train.run.restarts import Trust
from moba_train.telemetry.telemetry import Telemetry
from moba_train.train import main
from tests.forked import forked
from tests.run.faults import inject, overflow, scaled_gradient, steady
from tests.run.tiny_run import Run, assert_same_tensors
from tests.run.trainer_ranks import free_port

ROLLED_BACK = 26
WATCHED: list[tuple[Any, str]] = [
    (Recovery, "_roll_back"),
    (RunCheckpoints, "load"),
    (Trust, "loaded"),
    (Progress, "roll_back"),
    (Telemetry, "event"),
    (Telemetry, "log"),
    (Progress, "count_logged"),
    (RunCheckpoints, "save"),
    (SaveGroup, "gather"),
    (SaveGroup, "broadcast"),
    (publish, "make_temporary_folder"),
    (writer.ShardFile, "write"),
    (publish, "write_json"),
    (publish, "sync_folder"),
    (publish, "install"),
    (publish, "write_atomically"),
    (publish, "publish"),
    (retention.Retention, "apply"),
    (Progress, "end_evaluation"),
    (RunCheckpoints, "evaluated"),
    (RunCheckpoints, "before_update"),
]
"""Calls from the rollback to the end of the run, in the training thread and in that of a save."""
POINTS = ["before save", "after publish"]


def watch(at: str | int | None, delay_s: float | None, events: Path) -> None:
    """Kill this process at a point: the first of its name, or of this number, counted from the rollback on; or so many
    seconds after the rollback's save has begun. Write the points that were met to `events`."""
    met: list[str] = []
    lock = threading.Lock()

    def point(name: str) -> None:
        with lock:
            if met or name == "before _roll_back":
                met.append(name)
                events.write_text("\n".join(met))
                if at in (name, len(met)):
                    os.kill(os.getpid(), signal.SIGKILL)
        if name == "after save" and delay_s is not None:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            point(f"before {name}")
            result = real(*arguments, **options)
            point(f"after {name}")
            return result

        setattr(owner, name, call)

    for owner, name in WATCHED:
        watched(owner, name)


def train(rank: int, port: int, recipe: str, folder: str, at: str | int | None, delay_s: float | None) -> None:
    output = os.open(Path(folder, "output"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="localhost")
    inject(pytest.MonkeyPatch(), {22: scaled_gradient, ROLLED_BACK: overflow})
    if rank == 0:
        watch(at, delay_s, Path(folder, "events"))
    sys.exit(main([recipe]))


def start(run: Run, at: str | int | None = None, delay_s: float | None = None) -> int | None:
    """Train on two ranks; as torchrun does, end the second when the first has died. Exit code of the first."""
    arguments = (free_port(), str(run.write_recipe()), str(run.folder), at, delay_s)
    ranks = [forked().Process(target=train, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    ranks[0].join(300)
    if ranks[0].exitcode != 0:
        ranks[1].kill()
    ranks[1].join(300)
    return ranks[0].exitcode


def rolling_back(folder: Path, corpora: Path) -> Run:
    """It saves every fourth step, goes back from step 26 to step 20, and evaluates the step of the rollback."""
    folder.mkdir()
    run = steady(Run(folder, corpora), "rollback", 30)
    run.recipe["checkpoint"]["keep_last"] = 3
    run.recipe["evaluation"]["every"] = ROLLED_BACK // 2
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpora: Path) -> Run:
    run = rolling_back(tmp_path_factory.mktemp("undisturbed") / "run", corpora)
    run.recipe["checkpoint"]["keep_last"] = 20
    assert start(run) == 0
    return run


def kills() -> Iterator[tuple[str | int | None, float | None]]:
    """(point, delay) of each trial."""
    repeats = int(os.environ.get("MOBA_ROLLBACK_KILLS", "0"))
    dice = random.Random(repeats)
    yield from ((name, None) for name in POINTS)
    yield from ((number + 1, None) for number in range(repeats // 2))
    yield from ((None, dice.uniform(0, 0.3)) for _ in range(repeats // 2))


@pytest.mark.parametrize(("at", "delay_s"), [*kills()])
def test_a_kill_around_a_rollback_changes_nothing(
    undisturbed: Run, tmp_path: Path, corpora: Path, at: str | int | None, delay_s: float | None
) -> None:
    run = rolling_back(tmp_path / "killed", corpora)
    run.take_over(undisturbed, 24)
    killed = start(run, at, delay_s)
    assert killed == -signal.SIGKILL or at not in POINTS  # with fewer points or a long delay, it has ended before
    assert start(run) == 0
    assert_same_tensors(run.newest_checkpoint, undisturbed.newest_checkpoint)
    ours, theirs = (read_meta(each.newest_checkpoint)["progress"] for each in (run, undisturbed))
    assert ours == theirs
    for kind in ("metrics", "rollback", "spike", "validation_loss"):
        given, expected = (
            [(record["step"], record.get("loss")) for record in each.records(kind)] for each in (run, undisturbed)
        )
        assert given == expected, kind
