"""Checkpoints that a start of a run may go on from, and starts that bring a run no further.

`restarts.json` in the run folder lists the starts since the run last made progress, which is when a start finds a
checkpoint newer than the ones that all of them began with. A start that ends in order, finished or stopped as asked,
does not count. One that was killed counts, but says nothing about the checkpoint. One that ended because loss or
gradient norm were not finite does: when it saved no newer checkpoint, the next start takes an older one. Starts of a
recipe that saves nothing (`checkpoint.every: null`) are not listed. A run that has had checkpoints which are not found
does not begin at step 0.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import LATEST, Accept, named_latest, saved_step
from moba_train.checkpoint.retention import MARKS, Marks, read_entries, replace_entries
from moba_train.errors import CheckpointError, TrainingError
from moba_train.parallel.world import broadcast
from moba_train.telemetry.jsonl import read_backward

logger = logging.getLogger(__name__)


def check_first_start(run_dir: Path, from_scratch: bool) -> None:
    """Raises CheckpointError when the run has had a checkpoint, which was moved away or whose file system is not
    mounted, and when its history, which would say so, cannot be read.

    To be called on all ranks when no checkpoint is found; rank 0's files decide for all. A run that ended before its
    first checkpoint may begin again. `from_scratch` allows it in any case.
    """
    checkpoints = run_dir / "checkpoints"
    evidence = broadcast(_evidence_of_checkpoint(run_dir))
    if evidence is None:
        return
    if not from_scratch:
        raise CheckpointError(
            f"no checkpoint is found in {checkpoints}, but this run {evidence}. Put it back (was it moved "
            "away, or is its file system not mounted?), set run_dir to a new folder, or give --from-scratch to begin "
            "again at step 0; the metrics so far then move to metrics.discarded.jsonl"
        )
    (checkpoints / LATEST).unlink(missing_ok=True)  # else a restart before the first save would be refused


def warn_of_lost_checkpoint(run_dir: Path, folders: Sequence[Path], step: int) -> None:
    """Warn where the run's history tells of a newer checkpoint than that of `step`, from which the run resumes, and
    none of the folders holds it, nor what was set aside of it. To be called on one rank, before the history is cut."""
    had = _newest_in_history(run_dir)
    if had <= step or any(path for folder in folders for path in folder.glob(f"*step_{had:08d}*")):
        return
    text = "The checkpoint of step %d was complete and is not found in %s: the run goes on from step %d. %s"
    hint = "Was it moved away? Was run_dir, on which the folder in checkpoint.fallback_dir depends?"
    logger.warning(text, had, " or ".join(map(str, folders)), step, hint)


def _newest_in_history(run_dir: Path) -> int:
    """Step of the last checkpoint that the history says was complete or resumed from; 0 where it names none."""
    with contextlib.suppress(OSError):
        for record in read_backward(run_dir / "metrics.jsonl"):
            if record["type"] == "resume":
                return int(record["step"])
            saved = re.match(r"the checkpoint of step (\d+) is complete", str(record.get("message")))
            if saved is not None:
                return int(saved[1])
    return 0


def _evidence_of_checkpoint(run_dir: Path) -> str | None:
    """Evidence that the run has had a checkpoint, or may have had one, as a clause; None if it has had none."""
    if (name := named_latest(run_dir / "checkpoints")) is not None:
        return f"has had one: {run_dir / 'checkpoints' / LATEST} names {name}"
    metrics = run_dir / "metrics.jsonl"
    try:
        for record in read_backward(metrics):
            if record["type"] == "resume" or "checkpoint_save_s" in record:
                return f"has had one: {metrics} says, at step {record['step']}: {record.get('message')}"
    except OSError as error:
        return f"may have had one: {metrics}, which would say so, cannot be read: {error.strerror or error}"
    return None


RESTARTS = "restarts.json"

MOST_STARTS = 20
"""Starts in a row that save no newer checkpoint, after which the run refuses to start. Those that end in order do not
count."""
_SHOWN = 10
_LONGEST = 300


@dataclass
class Start:
    """One start of the run."""

    time: str
    from_step: int
    """Step of the checkpoint that it took; 0: none."""
    ended: str = ""
    """Its end in words; empty as long as that is not known: it runs, or was killed."""
    fatal: bool = False
    """True: it ended because loss or gradient norm were not finite."""


class Restarts:
    """The starts of a run since it last made progress. Used on rank 0."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RESTARTS
        self._starts = read_entries(self._path, "starts", Start)
        self._begun = False

    def blames(self, step: int) -> str | None:
        """Reason why the checkpoint of `step` must not be taken again: the start before also took it, ended with values
        that are not finite, and left nothing newer. None where that is not so."""
        last = self._starts[-1] if self._starts else None
        return last.ended if last is not None and last.fatal and last.from_step == step else None

    def begin(self, step: int, marked_steps: list[int]) -> str | None:
        """A start from the checkpoint of `step`, 0 without one; those of `marked_steps` are passed over. The error text
        if there have been MOST_STARTS without progress before, else None."""
        if self._starts:
            last = self._starts[-1]
            # Somebody has moved the newer checkpoints away on purpose, so the count begins again.
            moved_away = step < last.from_step and last.from_step not in marked_steps
            if moved_away or step > max(start.from_step for start in self._starts):
                self._starts = []
            elif step > last.from_step and not last.fatal:
                self._starts.pop()  # it came closer to where earlier ones have failed
        if len(self._starts) >= MOST_STARTS:
            return self._account()
        self._starts.append(Start(datetime.now().isoformat(" ", "seconds"), step))
        self._begun = True
        self._write()
        return None

    def end(self, how: str, fatal: bool = False) -> None:
        """The current start ends with an error; the first report of its end counts."""
        if self._begun and not self._starts[-1].ended:
            self._starts[-1].ended = how[:_LONGEST]
            self._starts[-1].fatal = fatal
            self._write()

    def end_in_order(self) -> None:
        """The current start has done what was asked of it."""
        if self._begun:
            self._starts.pop()
            self._begun = False
            self._write()

    def _write(self) -> None:
        replace_entries(self._path, "starts", self._starts)

    def _account(self) -> str:
        """Message: the starts, and the ways to go on."""
        lines = [
            f"  - {start.time}, from {f'step {start.from_step}' if start.from_step else 'the beginning'}: "
            + (start.ended or "ended without a message (killed, out of memory, or its node was lost)")
            for start in self._starts[-_SHOWN:]
        ]
        left_out = len(self._starts) - len(lines)
        earlier = [f"  - {left_out} earlier ones, in {self._path}"] if left_out else []
        furthest = max(start.from_step for start in self._starts)
        newer = f"newer than that of step {furthest}" if furthest else "at all"
        return "\n".join(
            [
                f"{len(self._starts)} starts in a row have saved no usable checkpoint {newer}:",
                *earlier,
                *lines,
                "Find the cause first: the output of those starts, "
                f"`moba-train inspect-spike {quote(str(self._path.parent))}`, "
                "a lower learning rate (optim.lr, or lr of a stage that has its own), another "
                "health.spike.reaction, fewer steps between checkpoints (checkpoint.every). Then delete "
                f"{self._path}, and run the same command again. Checkpoints that are passed over are "
                f"named in {self._path.parent / 'checkpoints' / MARKS}; delete it to use them again",
            ]
        )


def choose_checkpoint(
    find: Callable[[Accept], Path | None], marks: Marks, blames: Callable[[int], str | None], mark: Callable[..., None]
) -> Path | None:
    """The checkpoint that a start takes; None when there is none. Called on all ranks together.

    `find` finds the newest intact one that a predicate accepts, and raises CheckpointError when there are some but it
    accepts none; `mark(meta, reason)` marks a checkpoint on all ranks. Without an unmarked checkpoint the oldest marked
    one is taken, because whatever is wrong came in later.
    """
    path = _newest(find, marks)
    if path is None:
        return None
    meta = read_meta(path)
    step = saved_step(meta)
    reason = blames(step) if step is not None else None
    if reason is None or marks.reason(meta) is not None:
        return path
    mark(meta, f"a start from it left nothing newer: {reason}")
    return _newest(find, marks)


class Trust:
    """The checkpoints that a run may go on from, by what its starts and its steps have shown.

    The same on all ranks, which call every method together; files are rank 0's.
    """

    def __init__(self, run_dir: Path, checkpoints: Path, is_main: bool) -> None:
        """checkpoints: the run's own folder of them, which holds the marks."""
        self._folder = checkpoints
        self._restarts = Restarts(run_dir) if is_main else None
        self._marks = Marks([])
        self._doubted: list[tuple[int, str]] = []
        """Step and save id of the marked checkpoints that the present weights go on from."""

    def begin(self, find: Callable[[Accept], Path | None], counted: bool) -> Path | None:
        """Begin a start: the checkpoint that it takes, None when there is none. find: see `choose_checkpoint`.

        Raises TrainingError where MOST_STARTS in a row have made no progress, if starts are `counted`.
        """
        self._marks = broadcast(Marks.read(self._folder) if self._restarts is not None else Marks([]))
        path = choose_checkpoint(find, self._marks, self._blames, self._mark)
        problem = None
        if self._restarts is not None and counted:
            step = (saved_step(read_meta(path)) or 0) if path is not None else 0
            problem = self._restarts.begin(step, self._marks.steps)
        if problem := broadcast(problem):
            raise TrainingError(problem)
        return path

    def end(self, error: BaseException | None, fatal: bool = False) -> None:
        """End the start: in order, or by an error, whose first report counts. fatal: values were not finite."""
        if self._restarts is None:
            return
        if error is None:
            self._restarts.end_in_order()
        else:
            how = " ".join(str(error).split()) if fatal else f"{type(error).__name__}: {error}"
            self._restarts.end(how, fatal)

    def reason(self, meta: dict[str, Any]) -> str | None:
        """Reason why the checkpoint with this meta is passed over; None if it is not."""
        return self._marks.reason(meta)

    def accept(self, also: Accept) -> Accept:
        """Accepts checkpoints that are not passed over and that `also` accepts."""
        return self._marks.accept(also)

    def loaded(self) -> None:
        """Note that other weights were loaded: steps of these say nothing about checkpoints in doubt, which stay so."""
        self._doubted.clear()

    def doubt(self, step: int, save_id: str, reason: str) -> bool:
        """Pass over a checkpoint from now on, until `trust_again`; False if it is passed over already."""
        if not self._marks.add(step, save_id, reason):
            return False
        self._doubted.append((step, save_id))
        self._write()
        return True

    def trust_again(self) -> list[int]:
        """Take back every `doubt` since the last `loaded`: a step was applied to these weights, and its values were
        finite. Returns the steps of the checkpoints."""
        steps = [step for step, _ in self._doubted]
        for step, save_id in self._doubted:
            self._marks.remove(step, save_id)
        self._doubted.clear()
        if steps:
            self._write()
        return steps

    def _blames(self, step: int) -> str | None:
        return broadcast(self._restarts.blames(step) if self._restarts is not None else None)

    def _mark(self, meta: dict[str, Any], reason: str) -> None:
        step = saved_step(meta)
        if step is None:
            return
        if self._marks.add(step, meta.get("save_id", ""), reason) and self._restarts is not None:
            self._write()
            logger.warning("The checkpoint of step %d is passed over from now on: %s", step, reason)

    def _write(self) -> None:
        if self._restarts is not None:
            self._marks.write(self._folder)


def _newest(find: Callable[[Accept], Path | None], marks: Marks) -> Path | None:
    try:
        return find(marks.accept())
    except UnreadableError:
        raise
    except CheckpointError:
        # Oldest first: whatever is wrong with the marked ones came in later.
        for step in marks.steps:
            with suppress(CheckpointError):
                return find(lambda meta: saved_step(meta) == step)  # noqa: B023  # called at once
        raise
