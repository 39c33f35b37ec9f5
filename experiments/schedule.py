"""Runs arms side by side: some on each GPU, or one on several where it would not end in time on one; without a GPU one
by one."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from experiments.figure import Arm
from experiments.stop import LOOK_S, StoppedError, is_asked

Run = Callable[[Arm, Sequence[int]], None]
"""Runs an arm on these GPUs, to its end, and keeps its result."""
Seconds = Callable[[Arm, int, int], float]
"""How long an arm takes on a number of GPUs (0: on the CPU), each of which so many arms share."""


@dataclass(frozen=True)
class Outcome:
    """What `run_arms` did."""

    finished: list[Arm]
    left: list[Arm]
    """Arms that there was no time for, that lack another one's weights, or that were stopped."""
    failed: list[tuple[Arm, BaseException]]


def run_arms(
    arms: Sequence[Arm],
    gpus: int,
    deadline: float,
    run: Run,
    seconds: Seconds,
    ready: Callable[[Arm], bool] = lambda arm: True,
    arms_per_gpu: int = 1,
    label: Callable[[Arm], str] = lambda arm: arm.key,
) -> Outcome:
    """Run `arms` until none is left that would end before `deadline` (of `time.monotonic`), or until the call is asked
    to end (stop.py).

    ready         whether an arm that needs another one's weights has them; asked again whenever an arm has ended
    arms_per_gpu  how many share a GPU; with more than one, no arm has several GPUs
    label         how an arm is called in what is printed
    """
    waiting = list(arms)
    free = [*range(gpus)] * arms_per_gpu
    running: dict[Future[None], tuple[Arm, list[int]]] = {}
    outcome = Outcome([], [], [])
    with ThreadPoolExecutor(max(1, len(free))) as pool:
        while True:
            candidates = [] if is_asked() else [arm for arm in waiting if ready(arm)]
            sharing = min(arms_per_gpu, -(-(len(candidates) + len(running)) // max(1, gpus)))
            for arm in candidates:
                if not gpus and running:
                    break
                left = deadline - time.monotonic()
                count = gpus_for(arm, gpus if arms_per_gpu == 1 else min(gpus, 1), left, seconds, sharing)
                if count is None or count > len(free):
                    continue
                mine = _emptiest(free, count)
                for gpu in mine:
                    free.remove(gpu)
                waiting = [other for other in waiting if other is not arm]  # arms of two figures may be equal
                print(
                    f"{label(arm)}: begins on {_places(mine)}, about {seconds(arm, count, sharing):.0f} s", flush=True
                )
                running[pool.submit(run, arm, mine)] = arm, mine
            if not running:
                break
            for future in _ended(running):
                arm, mine = running.pop(future)
                free = sorted([*free, *mine])
                error = future.exception()
                if isinstance(error, StoppedError):
                    outcome.left.append(arm)
                    print(f"{label(arm)}: {error}", flush=True)
                elif error is not None:
                    outcome.failed.append((arm, error))
                    print(f"{label(arm)}: failed: {str(error).strip() or repr(error)}", flush=True)
                else:
                    outcome.finished.append(arm)
    outcome.left.extend(waiting)
    return outcome


def _ended(running: Iterable[Future[None]]) -> set[Future[None]]:
    """Waits for the first that end. It wakes now and then, because a signal's handler runs only when this thread is
    awake, and a signal that another thread received, or that came just before the wait, does not wake it."""
    done: set[Future[None]] = set()
    while not done:
        done, _ = wait(running, timeout=LOOK_S, return_when=FIRST_COMPLETED)
    return done


def _emptiest(free: Sequence[int], count: int) -> list[int]:
    """`count` GPUs, those with the most places in `free`."""
    return sorted(sorted(set(free)), key=lambda gpu: -free.count(gpu))[:count]


def gpus_for(arm: Arm, gpus: int, left: float, seconds: Seconds, sharing: int = 1) -> int | None:
    """The smallest number of GPUs, a power of 2, on which the arm ends within `left` seconds where `sharing` arms have
    each; 0 on a machine without; None: it does not end in time. A timed arm has one GPU, of which its rate is."""
    counts = [0] if not gpus else list(_powers(1 if arm.is_timed else gpus, _sequences(arm)))
    return next((count for count in counts if seconds(arm, count, sharing) <= left), None)


def _powers(gpus: int, sequences: int) -> Iterator[int]:
    """Powers of 2 up to `gpus` that divide a batch of `sequences` sequences."""
    count = 1
    while count <= gpus and sequences % count == 0:
        yield count
        count *= 2


def _sequences(arm: Arm) -> int:
    """The smallest batch of the arm's stages, in sequences."""
    return min(
        int(stage.get("batch_tokens", arm.recipe["batch_tokens"])) // int(stage["seq_len"])
        for stage in arm.recipe["stages"]
    )


def _places(gpus: Sequence[int]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "the CPU"
