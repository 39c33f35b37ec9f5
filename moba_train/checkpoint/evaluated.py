"""What the evaluations of a checkpoint's step found, which is known only after the checkpoint was saved.

A checkpoint never waits for an evaluation, so its numbers cannot be in its meta. They are in the file
`evaluations.json` beside the checkpoints: retention finds the best ones by it, and a run that resumes need not evaluate
again. Without the file, the evaluations of the checkpoint's step are run once more when the run resumes.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.publish import published, saved_step
from moba_train.checkpoint.small_file import read_small_file, replace_small_file

EVALUATIONS = "evaluations.json"

_MOST = 300
"""Checkpoints whose numbers are kept, the newest; the file may be 1 MiB, and an entry has 100 to 3,000 bytes."""

Numbers = dict[str, float]


class Evaluated:
    """The numbers of the checkpoints in one folder. Rank 0 reads and writes the file; other ranks get a copy."""

    def __init__(self, entries: dict[tuple[int, str], Numbers]) -> None:
        self._entries = entries

    @staticmethod
    def read(folder: Path) -> "Evaluated":
        """Those of `folder`. Entries that are not what `write` writes are left out."""
        entries = read_small_file(folder / EVALUATIONS).get("evaluations")
        found = [_entry_from(entry) for entry in (entries if isinstance(entries, list) else [])[-_MOST:]]
        return Evaluated(dict(filter(None, found)))

    def write(self, folder: Path) -> None:
        """Replace the file in `folder`, without the numbers of older checkpoints that are no longer there."""
        with suppress(UnreadableError):
            newest = max((step for step, _ in self._entries), default=0)  # it may still be being saved
            there = {newest, *(step for step, _ in published(folder))}
            self._entries = {key: numbers for key, numbers in self._entries.items() if key[0] in there}
        entries = [
            {"step": step, "save_id": save_id, "numbers": numbers}
            for (step, save_id), numbers in [*self._entries.items()][-_MOST:]
        ]
        replace_small_file(folder / EVALUATIONS, {"evaluations": entries})

    def add(self, step: int, save_id: str, numbers: Numbers) -> None:
        """Note what all evaluations of a checkpoint's step have found, by name."""
        self._entries[step, save_id] = dict(numbers)

    def numbers(self, meta: dict[str, Any]) -> Numbers | None:
        """What the evaluations found at the checkpoint with this meta; None where they were not completed."""
        step = saved_step(meta)
        save_id = meta.get("save_id")
        return self._entries.get((step, save_id)) if step is not None and isinstance(save_id, str) else None


def _entry_from(entry: Any) -> tuple[tuple[int, str], Numbers] | None:
    if not isinstance(entry, dict) or entry.keys() != {"step", "save_id", "numbers"}:
        return None
    step = entry["step"]
    save_id = entry["save_id"]
    numbers = entry["numbers"]
    if type(step) is not int or not isinstance(save_id, str) or not isinstance(numbers, dict):
        return None
    if not all(isinstance(value, float | int) for value in numbers.values()):
        return None
    return (step, save_id), {name: float(value) for name, value in numbers.items()}
