"""Notes on checkpoints that are written after them, and the choice of those that stay on disk.

Whether a save was healthy is in its meta (`good`), which the manifest's hash covers. What is known only later is in two
small JSON files beside the checkpoints:

- `marks.json` names those that must not be used although every byte is as it was written: the step right after one was
  not finite. Resume, rollback and retention pass over them.
- `evaluations.json` has what the evaluations of a checkpoint's step found. A checkpoint never waits for an evaluation,
  so its numbers cannot be in its meta. Retention finds the best ones by them, and a run that resumes need not evaluate
  again. Without the file, the evaluations of the checkpoint's step are run once more when the run resumes.

These files are a help and never the only copy: they are replaced atomically, bounded, and read without trust, with a
hash of their content, because one changed digit could end a stage. One that cannot be used counts as missing, and one
that cannot be written costs what it would have told the next start. Both are warnings.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_finite, is_good, named_latest, published, retire, saved_step
from moba_train.errors import CheckpointError, ForeignFileError
from moba_train.foreign_files import read_foreign
from moba_train.output_files import write_atomically
from moba_train.strict_json import from_json, to_json

MARKS = "marks.json"
EVALUATIONS = "evaluations.json"

SMALL_FILE_BYTES = 2**20
"""Largest small file."""
_MOST_MARKS = 200
"""Marks that are kept, the newest: a run has fewer checkpoints of which one could be in doubt."""
_LONGEST_REASON = 500
"""Characters."""
_MOST_EVALUATED = 300
"""Checkpoints whose numbers are kept, the newest; an entry has 100 to 3,000 bytes."""

Numbers = dict[str, float]
Entry = TypeVar("Entry")

logger = logging.getLogger(__name__)


def read_entries(path: Path, key: str, kind: type[Entry]) -> list[Entry]:
    """The entries, of a dataclass, that `replace_entries` wrote; none if there is no such file or, with a warning, if
    it cannot be used."""
    try:
        content = from_json(read_foreign(path, SMALL_FILE_BYTES, links=False).decode())
        values = content[key]
        if content.get("sha256") != _sha256(values):
            raise ValueError("its content does not have its sha256: it is damaged, or was edited")
        return TypeAdapter(list[kind]).validate_python(values)  # type: ignore[valid-type]  # known at run time
    except FileNotFoundError:
        return []
    except (OSError, ForeignFileError, ValueError, TypeError, LookupError, RecursionError) as error:
        logger.warning("%s is ignored: %s", path, str(error).removeprefix(f"{path}: "))
        return []


def replace_entries(path: Path, key: str, entries: Iterable[Any]) -> None:
    """Replace the file by one with `entries`, dataclasses; a reader finds the old content or the new one."""
    values = [asdict(entry) for entry in entries]
    try:
        write_atomically(path, to_json({"sha256": _sha256(values), key: values}, indent=1))
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


def _sha256(values: Any) -> str:
    return hashlib.sha256(to_json(values).encode()).hexdigest()


@dataclass(frozen=True)
class Mark:
    """One checkpoint that is passed over."""

    step: int
    save_id: str
    """`save_id` of its meta, empty if it has none: a later checkpoint of this step is another one."""
    reason: str


class Marks:
    """The marks of the checkpoints in one folder. Rank 0 reads and writes the file; other ranks get a copy."""

    def __init__(self, marks: list[Mark]) -> None:
        self._marks = {(mark.step, mark.save_id): mark for mark in marks}

    @staticmethod
    def read(folder: Path) -> "Marks":
        """Read the marks of `folder`."""
        return Marks(read_entries(folder / MARKS, "marks", Mark)[-_MOST_MARKS:])

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`."""
        replace_entries(folder / MARKS, "marks", [*self._marks.values()][-_MOST_MARKS:])

    def add(self, step: int, save_id: str, reason: str) -> bool:
        """Mark a checkpoint; False if it was marked before."""
        if (step, save_id) in self._marks:
            return False
        self._marks[step, save_id] = Mark(step, save_id, reason[:_LONGEST_REASON])
        return True

    def remove(self, step: int, save_id: str) -> None:
        """Unmark a checkpoint."""
        self._marks.pop((step, save_id), None)

    def reason(self, meta: dict[str, Any]) -> str | None:
        """Reason to pass over the checkpoint with this meta; None if there is none."""
        step = saved_step(meta)
        save_id = meta.get("save_id", "")
        mark = self._marks.get((step, save_id)) if step is not None and isinstance(save_id, str) else None
        return mark.reason if mark is not None else None

    def accept(self, also: Accept | None = None) -> Accept:
        """Accepts the meta of checkpoints that are not marked and, if given, that `also` accepts."""
        return lambda meta: self.reason(meta) is None and (also is None or also(meta))

    @property
    def steps(self) -> list[int]:
        """Steps of the marked checkpoints, in ascending order."""
        return sorted({mark.step for mark in self._marks.values()})


@dataclass(frozen=True)
class Evaluation:
    """Results of all evaluations at one checkpoint."""

    step: int
    save_id: str
    numbers: Numbers


class Evaluated:
    """The numbers of the checkpoints in one folder. Rank 0 reads and writes the file; other ranks get a copy."""

    def __init__(self, entries: dict[tuple[int, str], Numbers]) -> None:
        self._entries = entries

    @staticmethod
    def read(folder: Path) -> "Evaluated":
        """Read the numbers of `folder`."""
        found = read_entries(folder / EVALUATIONS, "evaluations", Evaluation)[-_MOST_EVALUATED:]
        return Evaluated({(entry.step, entry.save_id): entry.numbers for entry in found})

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`, without the numbers of older checkpoints that are no longer there."""
        with suppress(UnreadableError):
            newest = max((step for step, _ in self._entries), default=0)  # it may still be being saved
            there = {newest, *(step for step, _ in published(folder))}
            self._entries = {key: numbers for key, numbers in self._entries.items() if key[0] in there}
        entries = [Evaluation(*key, numbers) for key, numbers in [*self._entries.items()][-_MOST_EVALUATED:]]
        replace_entries(folder / EVALUATIONS, "evaluations", entries)

    def add(self, step: int, save_id: str, numbers: Numbers) -> None:
        """Note what all evaluations of a checkpoint's step have found, by name."""
        self._entries[step, save_id] = dict(numbers)

    def numbers(self, meta: dict[str, Any]) -> Numbers | None:
        """Results of the evaluations at the checkpoint with this meta; None if they were not completed."""
        step = saved_step(meta)
        save_id = meta.get("save_id")
        return self._entries.get((step, save_id)) if step is not None and isinstance(save_id, str) else None


@dataclass(frozen=True)
class Retention:
    """Keeps the `keep_last` newest checkpoints, the multiples of `keep_every` steps for ever, and in each stage the
    `keep_best` of lowest validation loss (losses of stages with other lengths cannot be compared).

    The loss is `eval_loss` in `evaluations.json` or, where the checkpoint was saved after its evaluation, in its meta,
    which also names the stage; a checkpoint without them is never among the best.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: int = 0
    _warned: set[Path] = field(default_factory=set, init=False, repr=False, compare=False)

    def apply(self, folder: Path, protect: Accept = is_good, marked_in: Path | None = None) -> None:
        """Removes all other checkpoints, except the one that `latest` names, the newest without NaN or infinite values,
        the newest whose meta `protect` agrees to, and those whose meta could not be read this time. A checkpoint whose
        meta is not known takes no place of `keep_last`, and stays as long as an older one that does. Checkpoints that
        `Marks` in the folder `marked_in`, by default this one, names count for nothing; those newer than all others
        stay, because training has not come past them yet. Raises OSError when the file system refuses to remove one."""
        keep: set[Path] = set()
        metas: dict[Path, dict[str, Any] | None] = {}
        checkpoints = published(folder)  # oldest first
        for _, path in checkpoints:
            try:
                metas[path] = read_meta(path)
            except UnreadableError as error:
                keep.add(path)  # it may be the best, or the newest good one
                metas[path] = None
                self._warn_once(path, f"{error}. It is kept for now")
            except CheckpointError as error:
                metas[path] = None
                self._warn_once(path, f"{error}. It counts as neither good nor best")
        marks = Marks.read(marked_in or folder)
        usable = {path: meta for path, meta in metas.items() if meta is None or marks.reason(meta) is None}
        known = [path for path, meta in usable.items() if meta is not None]
        keep |= _from(known[-self.keep_last :], usable)
        keep |= _from(list(usable)[-1:], metas)
        keep.add(folder / (named_latest(folder) or ""))
        keep |= {path for step, path in checkpoints if self.keep_every and step % self.keep_every == 0}
        for wanted in (protect, is_finite):
            keep |= set([path for path, meta in usable.items() if meta is not None and wanted(meta)][-1:])
        keep |= self._best(usable, Evaluated.read(folder)) if self.keep_best else set()
        for path in metas:
            if path not in keep:
                retire(path)

    def _warn_once(self, path: Path, problem: str) -> None:
        """Warns once about a checkpoint whose meta is not known; it is met again at every save."""
        if path not in self._warned:
            logger.warning("While old checkpoints are deleted: %s.", problem)
            self._warned.add(path)

    def _best(self, metas: dict[Path, dict[str, Any] | None], evaluated: Evaluated) -> set[Path]:
        """The checkpoints of lowest validation loss; among equal ones the newer."""
        stages: dict[str, list[tuple[float, Path]]] = {}
        for path, meta in reversed(metas.items()):
            if meta is None:
                continue
            loss = meta.get("eval_loss", (evaluated.numbers(meta) or {}).get("eval_loss"))
            if isinstance(loss, float) and math.isfinite(loss):
                stages.setdefault(str(meta.get("stage")), []).append((loss, path))
        ranked = (sorted(losses, key=lambda entry: entry[0]) for losses in stages.values())
        return {path for losses in ranked for _, path in losses[: self.keep_best]}


def _from(some: Sequence[Path], checkpoints: Iterable[Path]) -> set[Path]:
    """Return the checkpoints, oldest first, that are no older than the first of `some`; all if there is none."""
    every = list(checkpoints)
    return set(every[every.index(some[0]) :] if some else every)
