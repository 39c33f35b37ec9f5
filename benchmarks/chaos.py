"""Chaos: training processes are killed, stalled and starved of disk at random moments, and the run must not care.

    python -m benchmarks.chaos --kills 100 --fork --workers 3 --output benchmarks/results/chaos.json    (on Linux)

Runs of 240 steps on two ranks under torchrun (`--max-restarts`) are disturbed up to twenty times each. Nobody helps:
when torchrun itself was killed or told to end, the same command is given again, as a scheduler would. After each
disturbance the run must go on from a checkpoint no older than the newest one published before it, and at its end the
tensors of its last checkpoint (model, optimizer, random states) must be those of an undisturbed run, bit by bit.
"""

import argparse
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_run import EVERY, STEPS, ChaosRun, is_running, ranks_of
from benchmarks.record import save, spread
from moba_train.checkpoint.manifest import MANIFEST
from moba_train.checkpoint.publish import published

PER_RUN = 20
STALL_TIMEOUT_S = 30
ORPHANS_MAY_TAKE_S = 5.0


@dataclass
class Tally:
    """What was done and what came of it."""

    disturbances: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    """When the kills fell: during a save, between saves, before the first step."""
    steps_lost: list[int] = field(default_factory=list)
    """Steps trained and not saved when a kill fell, as far as they were logged."""
    restart_s: list[float] = field(default_factory=list)
    orphans_ended_s: list[float] = field(default_factory=list)
    runs: int = 0
    ended_bitwise_equal: int = 0
    commands_given: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Take over what another one counted."""
        self.disturbances.update(other.disturbances)
        self.moments.update(other.moments)
        for name in ("steps_lost", "restart_s", "orphans_ended_s", "failures"):
            getattr(self, name).extend(getattr(other, name))
        self.runs += other.runs
        self.ended_bitwise_equal += other.ended_bitwise_equal
        self.commands_given += other.commands_given

    def report(self) -> dict[str, Any]:
        """As JSON values."""
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
        self.kind, self.run, self.dice, self.tally = kind, run, dice, tally
        self.floor = 0
        """Step of the oldest checkpoint that the run may go on from."""

    def apply(self) -> bool:
        """False when the run came to its end before it could be disturbed."""
        run = self.run
        if not self._moment():
            return False
        self.floor, attempts, first_line = run.saved_step, len(run.starts()), len(run.lines)
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
        if not run.wait(lambda: len(run.starts()) > attempts, what="a new start"):
            return True  # the last step was done and saved before
        resumed = run.starts()[-1]
        self.tally.restart_s.append(round(time.monotonic() - began, 2))
        if resumed < self.floor:
            raise AssertionError(f"{self.kind}: step {self.floor} was there to go on from, the run took {resumed}")
        damaged = self.kind in ("flipped_byte", "truncated_manifest")
        if damaged and not run.says("Passing over a damaged checkpoint", first_line):
            raise AssertionError(f"{self.kind}: the damaged checkpoint was not named:\n{run.tail()}")
        return True

    def _moment(self) -> bool:
        """Waits for the moment to strike: while starting, at any time, or during a save."""
        run, dice = self.run, self.dice
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
        chosen = {"rank": self.dice.sample(ranks, min(1, len(ranks))), "ranks": ranks}
        logged = _last_logged_step(run)
        for process in chosen.get(which, [run.launcher.pid]):
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
        """SIGSTOP one rank: the other gives up after `parallel.timeout`, torchrun starts both anew."""
        with suppress(ProcessLookupError):
            os.kill(self.dice.choice(ranks_of(self.run.launcher.pid)), signal.SIGSTOP)

    def terminate(self, agent: bool) -> None:
        """SIGTERM to a rank, as schedulers send it, or to torchrun, which hands it on: save and end."""
        ranks = ranks_of(self.run.launcher.pid)
        with suppress(ProcessLookupError):
            os.kill(self.run.launcher.pid if agent else self.dice.choice(ranks), signal.SIGTERM)

    def fill_disk(self) -> None:
        """No file may grow beyond 1,000 bytes: the system refuses the writes of real saves."""
        run, first = self.run, len(self.run.lines)
        ranks = ranks_of(run.launcher.pid)
        limits = [resource.prlimit(process, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)) for process in ranks]
        try:
            self._expect_failed_save(first)
        finally:
            for process, limit in zip(ranks, limits, strict=True):
                with suppress(ProcessLookupError):
                    resource.prlimit(process, resource.RLIMIT_FSIZE, limit)

    def forbid_writing(self) -> None:
        """The checkpoint folder becomes read-only for a while."""
        first = len(self.run.lines)
        self.run.checkpoints.chmod(0o500)
        try:
            self._expect_failed_save(first)
        finally:
            self.run.checkpoints.chmod(0o700)

    def _expect_failed_save(self, first: int) -> None:
        self.run.wait(lambda: self.run.says("was not saved", first), 60, "the report of a failed save")

    def damage(self, flip: bool) -> None:
        """With the run dead, flip a byte of the newest checkpoint's largest shard, or cut its manifest in half."""
        self.kill("agent")
        (self.floor, _), (_, newest) = published(self.run.checkpoints)[-2:]
        file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size) if flip else newest / MANIFEST
        content = bytearray(file.read_bytes())
        content[self.dice.randrange(len(content))] ^= 1 << self.dice.randrange(8)
        file.write_bytes(content if flip else content[: len(content) // 2])

    def turn_back_clock(self) -> None:
        """The clock goes back a day and files claim odd ages, the older checkpoints to be newer; then a kill."""
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
"""How often it strikes while ranks start, at any time in training, and during a save; the others at any time."""
GO_ON = ("disk_full", "read_only_folder")
"""The run is not interrupted at all."""
NEEDS_COMMAND = ("kill_agent", "sigterm_rank", "sigterm_agent", "flipped_byte", "truncated_manifest")
"""torchrun is gone, so that somebody must give the command again."""


def _last_logged_step(run: ChaosRun) -> int:
    """The newest step on the console since the last start."""
    for line in reversed(run.lines):
        if line.startswith("step "):
            return int(line.split()[1].partition("/")[0])
        if " at step " in line and "resume" in line:
            return 0
    return 0


def plan(kills: int, dice: random.Random) -> list[str]:
    """So many kills, and one of each other kind for every 40 of them, in random order."""
    others = [kind for kind in ACTIONS if kind not in KILLS]
    kinds = dice.choices(KILLS, [4, 3, 3], k=kills) + others * max(1, kills // 40)
    dice.shuffle(kinds)
    return kinds


class Chaos:
    """Runs below `folder` that are disturbed in the ways of `pending`, one after the other, `PER_RUN` in each run.

    Several threads may `work` at once; each takes its runs from the same list. `tally` holds what came of them.
    """

    def __init__(self, pending: list[str], folder: Path, seed: int, fork: bool, steps: int = STEPS) -> None:
        self.pending, self.folder, self.fork, self.steps = list(pending), folder, fork, steps
        self.tally = Tally()
        self._runs = 0
        self._dice = random.Random(seed)
        self._lock = threading.Lock()
        undisturbed = ChaosRun(folder / "undisturbed", fork, steps)
        undisturbed.launch()
        undisturbed.wait_for_end(600)
        if not undisturbed.finished:
            raise RuntimeError(f"not even the undisturbed run ends well:\n{undisturbed.tail()}")
        self._expected = undisturbed.state()

    def work(self, report: Callable[[Tally], None] = lambda _: None) -> None:
        """Disturb runs until nothing is pending; `report` hears of each run."""
        while True:
            with self._lock:
                kinds, self.pending = self.pending[:PER_RUN], self.pending[PER_RUN:]
                if not kinds:
                    return
                self._runs += 1
                number, dice = self._runs, random.Random(self._dice.random())
            timeout_s = STALL_TIMEOUT_S if "stall_rank" in kinds else 120
            run, tally = ChaosRun(self.folder / f"run{number}", self.fork, self.steps, timeout_s), Tally(runs=1)
            failure = self._disturb(run, kinds, dice, tally)
            tally.commands_given = run.launches
            tally.ended_bitwise_equal = int(failure is None)
            tally.failures = [f"run {number}, {failure}"] if failure else []
            with self._lock:
                self.pending = kinds + self.pending
                self.tally.add(tally)
                report(self.tally)

    def _disturb(self, run: ChaosRun, kinds: list[str], dice: random.Random, tally: Tally) -> str | None:
        """One run from its start to its end. Takes from `kinds` what was done; returns what went wrong."""
        doing = "the start"
        try:
            run.launch()
            while kinds:
                doing = kinds[0]
                if not Disturbance(doing, run, dice, tally).apply():
                    break
                kinds.pop(0)
            doing = "the end"
            run.wait_for_end(600)
            if not run.finished:
                run.launch()  # a SIGTERM may have come so late that its save was the end
                run.wait_for_end(600)
            if not run.finished or run.state() != self._expected:
                return f"{doing}: step {run.saved_step}, other bits:\n{run.tail()}"
        except (AssertionError, TimeoutError) as error:
            if kinds and doing == kinds[0]:
                kinds.pop(0)
            return f"{doing}: {error}"
        finally:
            run.end()
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs of a rank, of all ranks or of torchrun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fork", action="store_true", help="ranks forked from torchrun's agent: sooner restarted")
    parser.add_argument("--workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    began = time.monotonic()
    settings = {key: value for key, value in vars(arguments).items() if key != "output"} | {"checkpoint_every": EVERY}

    def report(tally: Tally) -> None:
        print(f"run {tally.runs}: {dict(tally.disturbances)}, {len(tally.failures)} failures", flush=True)
        save(arguments.output, settings, tally.report() | {"seconds": round(time.monotonic() - began)})

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        kinds = plan(arguments.kills, random.Random(arguments.seed))
        chaos = Chaos(kinds, Path(folder), arguments.seed, arguments.fork)
        for worker in [pool.submit(chaos.work, report) for _ in range(arguments.workers)]:
            worker.result()
    print("\n".join(chaos.tally.failures) or "no failures")
    return 1 if chaos.tally.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
