"""One disturbance of a run: its random moment, what is done, and how the run must go on."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.chaos_run import EVERY, ChaosRun
from benchmarks.chaos_tally import Tally
from benchmarks.trainer_run import is_running, ranks_of

ORPHANS_MAY_TAKE_S = 5.0


@dataclass(frozen=True)
class Action:
    """What is done to a run, and what it may cost."""

    make: Callable[["Disturbance"], None]
    moments: tuple[int, int, int] = (0, 1, 0)
    """Odds of the moments: while ranks start, at any time in training, during a save."""
    goes_on: bool = False
    """Whether the run goes on without a new start."""
    needs_command: bool = False
    """Whether torchrun ends, so that the command must be given again."""
    says: str = ""
    """Text that the run prints about it."""
    is_kill: bool = False
    """Whether it is one of the plain kills."""


class NoRankError(Exception):
    """All ranks have ended."""


class Disturbance:
    """One disturbance of a run, at a random moment."""

    def __init__(self, name: str, action: Action, run: ChaosRun, dice: random.Random, tally: Tally) -> None:
        self.name = name
        self.action = action
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
        try:
            self.action.make(self)
        except NoRankError:
            return False
        self.tally.disturbances[self.name] += 1
        self.tally.kills += self.action.is_kill
        if not self.action.goes_on:
            self._go_on(earlier_starts, began)
        said = self.action.says
        if said and run.finished is False and not run.wait(lambda: run.says(said, first_line), 60, repr(said)):
            self.expect(run.says(said, first_line), f"it did not say {said!r}")
        return True

    def _go_on(self, earlier_starts: int, began: float) -> None:
        """Wait until the run has started again, from a checkpoint that is not too old."""
        run = self.run
        if self.action.needs_command:
            run.wait_for_end(90)
        if run.ended and not run.finished:
            self.expect(self.action.needs_command, f"torchrun ended with {run.launcher.returncode}")
            run.launch()
        if not run.wait(lambda: len(run.starts()) > earlier_starts, what="a new start"):
            return  # the last step was done and saved before
        resumed = run.starts()[-1]
        self.tally.restart_s.append(round(time.monotonic() - began, 2))
        self.expect(resumed >= self.floor, f"step {self.floor} could be resumed from, the run took {resumed}")

    def expect(self, condition: bool, otherwise: str) -> None:
        """Raise AssertionError with the end of the output unless `condition`."""
        if not condition:
            raise AssertionError(f"{self.name}: {otherwise}:\n{self.run.tail()}")

    def _moment(self) -> bool:
        """Wait for a random moment: while ranks start, at any time in training, or during a save. False when the run
        has ended."""
        run = self.run
        dice = self.dice
        if not run.wait(lambda: len(ranks_of(run.launcher.pid)) == 2, what="two ranks"):
            return False
        when = dice.choices(["starting", "any", "save"], self.action.moments)[0]
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

    def one_rank(self) -> int:
        """Process id of a random rank. Raises NoRankError where none is left: a run may end at any moment."""
        ranks = ranks_of(self.run.launcher.pid)
        if not ranks:
            raise NoRankError
        return self.dice.choice(ranks)

    def kill(self, which: str) -> None:
        """SIGKILL one rank, all ranks or the agent."""
        run = self.run
        ranks = ranks_of(run.launcher.pid)
        victims = {"rank": self.dice.sample(ranks, min(1, len(ranks))), "ranks": ranks}
        logged = run.logged_step()
        for process in victims.get(which, [run.launcher.pid]):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self.action.is_kill:
            moment = "starting" if not run.starts() or not logged else "in a save" if run.saving else "between saves"
            self.tally.moments[moment] += 1
            self.tally.steps_lost.append(max(0, logged - run.saved_step))
        if which == "agent":
            began = time.monotonic()
            while any(map(is_running, ranks)):
                self.expect(time.monotonic() - began < ORPHANS_MAY_TAKE_S, "ranks outlive their killed torchrun")
                time.sleep(0.002)
            self.tally.orphans_ended_s.append(round(time.monotonic() - began, 3))

    def arm(self, fault: str) -> None:
        """Let the next rank that can suffer `fault` (chaos_rank.py) suffer it, and wait until it has."""
        file = self.run.faults / fault
        file.touch()
        self.run.wait(lambda: not file.exists(), 60, f"a rank that suffers {fault}")
