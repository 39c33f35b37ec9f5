"""The disturbances of the chaos suite, and their tally: kills, stalls, a full disk, damaged files, a wrong clock."""

import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_run import EVERY, ChaosRun
from benchmarks.record import spread
from benchmarks.trainer_run import is_running, ranks_of
from moba_train.checkpoint.manifest import MANIFEST
from moba_train.checkpoint.publish import published

ORPHANS_MAY_TAKE_S = 5.0


@dataclass
class Tally:
    """How many disturbances of each kind were made, and their outcome."""

    disturbances: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    """When the kills happened: during a save, between saves, before the first step."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps trained and not saved when a kill happened, as far as they were logged."""
    restart_s: list[float] = field(default_factory=list)
    orphans_ended_s: list[float] = field(default_factory=list)
    runs: int = 0
    ended_bitwise_equal: int = 0
    commands_given: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Add the counts of `other`."""
        self.disturbances.update(other.disturbances)
        self.moments.update(other.moments)
        for name in ("steps_lost", "restart_s", "orphans_ended_s", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.runs += other.runs
        self.ended_bitwise_equal += other.ended_bitwise_equal
        self.commands_given += other.commands_given

    def report(self) -> dict[str, Any]:
        """The tally as JSON values."""
        lists = {"restart_s": self.restart_s, "orphans_ended_s": self.orphans_ended_s}
        return {
            "disturbances": dict(sorted(self.disturbances.items())),
            "kills": sum(self.disturbances[kind] for kind in KILLS),
            "moments_of_kills": dict(self.moments),
            "steps_lost": spread([float(lost) for lost in self.steps_lost]) if self.steps_lost else None,
            **{name: spread(values) if values else None for name, values in lists.items()},
            "runs": self.runs,
            "ended_bitwise_equal": self.ended_bitwise_equal,
            "commands_given": self.commands_given,
            "failures": self.failures,
        }


class Disturbance:
    """One disturbance of a run, at a random moment."""

    def __init__(self, kind: str, run: ChaosRun, dice: random.Random, tally: Tally) -> None:
        self.kind = kind
        self.run = run
        self.dice = dice
        self.tally = tally
        self.floor = 0
        """Step of the oldest checkpoint that the run may go on from."""

    def apply(self) -> bool:
        """Make the disturbance and check how the run goes on. False when the run ended before it could be disturbed."""
        run = self.run
        if not self._moment():
            return False
        self.floor = run.saved_step
        earlier_starts = len(run.starts())
        first_line = len(run.lines)
        began = time.monotonic()
        ACTIONS[self.kind](self)
        self.tally.disturbances[self.kind] += 1
        if self.kind in GO_ON:
            return True
        if self.kind in NEEDS_COMMAND:
            run.wait_for_end(90)
        if run.ended and not run.finished:
            if self.kind not in NEEDS_COMMAND:
                raise AssertionError(f"torchrun ended with {run.launcher.returncode} after {self.kind}:\n{run.tail()}")
            run.launch()
        if not run.wait(lambda: len(run.starts()) > earlier_starts, what="a new start"):
            return True  # the last step was done and saved before
        resumed = run.starts()[-1]
        self.tally.restart_s.append(round(time.monotonic() - began, 2))
        if resumed < self.floor:
            raise AssertionError(f"{self.kind}: step {self.floor} could be resumed from, the run took {resumed}")
        damaged = self.kind in ("flipped_byte", "truncated_manifest")
        if damaged and not run.says("Passing over a damaged checkpoint", first_line):
            raise AssertionError(f"{self.kind}: the damaged checkpoint was not named:\n{run.tail()}")
        return True

    def _moment(self) -> bool:
        """Wait for a random moment: while ranks start, at any time in training, or during a save. False when the run
        has ended."""
        run = self.run
        dice = self.dice
        if not run.wait(lambda: len(ranks_of(run.launcher.pid)) == 2, what="two ranks"):
            return False
        when = dice.choices(["starting", "any", "save"], MOMENTS.get(self.kind, (0, 1, 0)))[0]
        if when == "starting":
            time.sleep(dice.uniform(0, 4))
            return not run.ended
        first = len(run.lines)
        if not run.wait(lambda: run.says("step ", first) and run.saved_step > EVERY, what="training"):
            return False
        if when == "save":
            if not run.wait(lambda: not run.saving) or not run.wait(lambda: run.saving, what="a save"):
                return False
            time.sleep(dice.uniform(0, 0.08))
        else:
            time.sleep(dice.uniform(0, 0.6))
        return not run.ended

    def kill(self, which: str) -> None:
        """SIGKILL one rank, all ranks or the agent."""
        run = self.run
        ranks = ranks_of(run.launcher.pid)
        victims = {"rank": self.dice.sample(ranks, min(1, len(ranks))), "ranks": ranks}
        logged = _last_logged_step(run)
        for process in victims.get(which, [run.launcher.pid]):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.kind in KILLS:
            moment = "starting" if not run.starts() or not logged else "in a save" if run.saving else "between saves"
            self.tally.moments[moment] += 1
            self.tally.steps_lost.append(max(0, logged - run.saved_step))
        if which == "agent":
            began = time.monotonic()
            while any(map(is_running, ranks)):
                if time.monotonic() - began > ORPHANS_MAY_TAKE_S:
                    raise AssertionError("ranks outlive their killed torchrun")
                time.sleep(0.002)
            self.tally.orphans_ended_s.append(round(time.monotonic() - began, 3))

    def stall(self) -> None:
        """SIGSTOP one rank: the other gives up after `parallel.timeout`, and torchrun restarts both."""
        with suppress(ProcessLookupError):
            os.kill(self.dice.choice(ranks_of(self.run.launcher.pid)), signal.SIGSTOP)

    def terminate(self, agent: bool) -> None:
        """Send SIGTERM to a rank, as schedulers do, or to torchrun, which passes it on: the run saves and ends."""
        ranks = ranks_of(self.run.launcher.pid)
        with suppress(ProcessLookupError):
            os.kill(self.run.launcher.pid if agent else self.dice.choice(ranks), signal.SIGTERM)

    def fill_disk(self) -> None:
        """Limit all files to 1,000 bytes for a while: the system refuses the writes of real saves."""
        run = self.run
        first = len(run.lines)
        ranks = ranks_of(run.launcher.pid)
        limits = [resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)) for process in ranks]
        try:
            self._expect_failed_save(first)
        finally:
            for process, limit in zip(ranks, limits, strict=True):
                with suppress(ProcessLookupError):
                    resource.prlimit(process, resource.RLIMIT_FSIZE, limit)

    def forbid_writing(self) -> None:
        """Make the checkpoint folder read-only for a while."""
        first = len(self.run.lines)
        self.run.checkpoints.chmod(0o500)
        try:
            self._expect_failed_save(first)
        finally:
            self.run.checkpoints.chmod(0o700)

    def _expect_failed_save(self, first: int) -> None:
        self.run.wait(lambda: self.run.says("was not saved", first), 60, "the report of a failed save")

    def damage(self, flip: bool) -> None:
        """Kill the run, then flip a bit of the newest checkpoint's largest shard, or cut its manifest in half."""
        self.kill("agent")
        (self.floor, _), (_, newest) = published(self.run.checkpoints)[-2:]
        file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size) if flip else newest / MANIFEST
        content = bytearray(file.read_bytes())
        content[self.dice.randrange(len(content))] ^= 1 << self.dice.randrange(8)
        file.write_bytes(content if flip else content[: len(content) // 2])

    def turn_back_clock(self) -> None:
        """Set the clock back by a day, change file times so that older checkpoints look newer, and kill the run."""
        self.run.folder.joinpath("clock").write_text("-86400")
        for age, (_, path) in enumerate(published(self.run.checkpoints)):
            for file in (path, *path.iterdir()):
                os.utime(file, (1e9 - 1e6 * age, 1e9 - 1e6 * age))
        self.kill("ranks")


ACTIONS: dict[str, Callable[[Disturbance], None]] = {
    "kill_rank": lambda it: it.kill("rank"),
    "kill_all_ranks": lambda it: it.kill("ranks"),
    "kill_agent": lambda it: it.kill("agent"),
    "stall_rank": Disturbance.stall,
    "sigterm_rank": lambda it: it.terminate(agent=False),
    "sigterm_agent": lambda it: it.terminate(agent=True),
    "disk_full": Disturbance.fill_disk,
    "read_only_folder": Disturbance.forbid_writing,
    "flipped_byte": lambda it: it.damage(flip=True),
    "truncated_manifest": lambda it: it.damage(flip=False),
    "clock_back": Disturbance.turn_back_clock,
}
KILLS = ("kill_rank", "kill_all_ranks", "kill_agent")
MOMENTS = dict.fromkeys(KILLS, (1, 4, 4)) | dict.fromkeys(("sigterm_rank", "sigterm_agent"), (0, 1, 1))
"""Odds of the moments (while ranks start, at any time in training, during a save); other kinds: at any time."""
GO_ON = ("disk_full", "read_only_folder")
"""Disturbances that do not interrupt the run."""
NEEDS_COMMAND = ("kill_agent", "sigterm_rank", "sigterm_agent", "flipped_byte", "truncated_manifest")
"""Disturbances that end torchrun, so that the command must be given again."""


def _last_logged_step(run: ChaosRun) -> int:
    """The newest step on the console since the last start."""
    for line in reversed(run.lines):
        if line.startswith("step "):
            return int(line.split()[1].partition("/")[0])
        if " at step " in line and "resume" in line:
            return 0
    return 0
