"""Chaos: training processes are killed, stalled, starved of disk and given damaged files and numbers at random moments;
the run must end bitwise equal.

    python -m benchmarks.chaos --kills 100 --fork --workers 3 --output benchmarks/results/chaos.json    (on Linux)

Runs of 240 steps on two ranks under torchrun (`--max-restarts`) are disturbed up to twenty times each. The only help is
a scheduler's: when torchrun itself was killed or told to end, the same command is given again. After each disturbance
the run must go on from a checkpoint no older than the newest one published before it, and at its end the tensors of its
last checkpoint (model, optimizer, random states) must be those of an undisturbed run, bit by bit. metrics.jsonl must
hold every logged step once.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.chaos_actions import ACTIONS, KILLS
from benchmarks.chaos_disturbances import Disturbance
from benchmarks.chaos_run import EVERY, STEPS, ChaosRun
from benchmarks.chaos_tally import Tally
from benchmarks.record import save

PER_RUN = 20
STALL_TIMEOUT_S = 30


def plan(kills: int, dice: random.Random) -> list[str]:
    """Disturbances in random order: `kills` kills, and one of each other kind for every 40 of them."""
    others = [kind for kind in ACTIONS if kind not in KILLS]
    kinds = dice.choices(KILLS, [4, 3, 3], k=kills) + others * max(1, kills // 40)
    dice.shuffle(kinds)
    return kinds


class Chaos:
    """Runs below `folder` that suffer the `pending` disturbances, one after the other, `PER_RUN` in each run.

    Several threads may `work` at once; all take disturbances from the same list. `tally` holds the outcome.
    """

    def __init__(self, pending: list[str], folder: Path, seed: int, fork: bool, steps: int = STEPS) -> None:
        self.pending = list(pending)
        self.folder = folder
        self.fork = fork
        self.steps = steps
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
        self._metric_steps = undisturbed.metric_steps()

    def work(self, report: Callable[[Tally], None] = lambda _: None) -> None:
        """Disturb runs until nothing is pending, and call `report` after each."""
        while True:
            with self._lock:
                kinds = self.pending[:PER_RUN]
                self.pending = self.pending[PER_RUN:]
                if not kinds:
                    return
                self._runs += 1
                number = self._runs
                dice = random.Random(self._dice.random())
            timeout_s = STALL_TIMEOUT_S if "stall_rank" in kinds else 120
            run = ChaosRun(self.folder / f"run{number}", self.fork, self.steps, timeout_s)
            tally = Tally(runs=1)
            failure = self._disturb(run, kinds, dice, tally)
            tally.commands_given = run.launches
            tally.ended_bitwise_equal = int(failure is None)
            tally.failures = [f"run {number}, {failure}"] if failure else []
            with self._lock:
                self.pending = kinds + self.pending
                self.tally.add(tally)
                report(self.tally)

    def _disturb(self, run: ChaosRun, kinds: list[str], dice: random.Random, tally: Tally) -> str | None:
        """Take one run from start to end. Removes the disturbances that were made from `kinds`; returns the failure."""
        doing = "the start"
        try:
            run.launch()
            while kinds:
                doing = kinds[0]
                if not Disturbance(doing, ACTIONS[doing], run, dice, tally).apply():
                    break
                kinds.pop(0)
            doing = "the end"
            run.wait_for_end(600)
            if not run.finished:
                run.launch()  # a SIGTERM may have come so late that its save was the end
                run.wait_for_end(600)
            if not run.finished or run.state() != self._expected:
                return f"{doing}: step {run.saved_step}, other bits:\n{run.tail()}"
            if run.metric_steps() != self._metric_steps:
                return f"the end: metrics.jsonl holds the steps {run.metric_steps()}"
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
    parser.add_argument("--fork", action="store_true", help="fork ranks from torchrun's agent: faster restarts")
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
