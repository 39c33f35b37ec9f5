"""Checkpoints that must not be used although every byte is as it was written: what came after them shows it.

Whether a save was healthy is in its meta (`good`), which the manifest's hash covers. What is known only later, such as
a step right after it that was not finite, is in the file `marks.json` beside the checkpoints. Resume, rollback and
retention pass over the checkpoints that it names.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moba_train.checkpoint.publish import Accept, saved_step
from moba_train.checkpoint.small_file import read_small_file, replace_small_file

MARKS = "marks.json"

_MOST = 200
"""Marks that are kept, the newest: a run has fewer checkpoints of which one could be in doubt."""
_LONGEST = 500
"""Characters of a reason."""


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
        """Those of `folder`. Entries that are not marks are left out."""
        entries = read_small_file(folder / MARKS).get("marks")
        found = [_mark_from(entry) for entry in (entries if isinstance(entries, list) else [])[-_MOST:]]
        return Marks([mark for mark in found if mark is not None])

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`."""
        replace_small_file(folder / MARKS, {"marks": [asdict(mark) for mark in [*self._marks.values()][-_MOST:]]})

    def add(self, step: int, save_id: str, reason: str) -> bool:
        """Mark a checkpoint; False if it was marked before."""
        if (step, save_id) in self._marks:
            return False
        self._marks[step, save_id] = Mark(step, save_id, reason[:_LONGEST])
        return True

    def remove(self, step: int, save_id: str) -> None:
        """Unmark a checkpoint."""
        self._marks.pop((step, save_id), None)

    def reason(self, meta: dict[str, Any]) -> str | None:
        """Why the checkpoint with this meta is passed over; None if it is not."""
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


def _mark_from(entry: Any) -> Mark | None:
    if not isinstance(entry, dict) or entry.keys() != {"step", "save_id", "reason"}:
        return None
    mark = Mark(**entry)
    valid = type(mark.step) is int and isinstance(mark.save_id, str) and isinstance(mark.reason, str)
    return mark if valid else None
