"""Which checkpoints stay on disk when a new one is published."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moba_train.checkpoint.evaluated import Evaluated
from moba_train.checkpoint.files import UnreadableError
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.marks import Marks
from moba_train.checkpoint.publish import LATEST, Accept, hide, is_finite, is_good, published, remove
from moba_train.errors import CheckpointError

logger = logging.getLogger(__name__)


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
        pointer = folder / LATEST
        known = [path for path, meta in usable.items() if meta is not None]
        keep |= _from(known[-self.keep_last :], usable)
        keep |= _from(list(usable)[-1:], metas)
        keep |= {folder / pointer.read_text(encoding="utf-8", errors="replace").strip()} if pointer.exists() else set()
        keep |= {path for step, path in checkpoints if self.keep_every and step % self.keep_every == 0}
        for wanted in (protect, is_finite):
            keep |= set([path for path, meta in usable.items() if meta is not None and wanted(meta)][-1:])
        keep |= self._best(usable, Evaluated.read(folder)) if self.keep_best else set()
        for path in metas:
            if path not in keep:
                remove(hide(path))

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
    """Those of the checkpoints, oldest first, that are no older than the first of `some`; all where there is none."""
    every = list(checkpoints)
    return set(every[every.index(some[0]) :] if some else every)
