"""Which checkpoints stay on disk when a new one is published."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.marks import Marks
from moba_train.checkpoint.publish import LATEST, Accept, hide, is_good, published, remove
from moba_train.errors import CheckpointError


@dataclass(frozen=True)
class Retention:
    """Keeps the `keep_last` newest checkpoints, the multiples of `keep_every` steps for ever, and in each stage the
    `keep_best` of lowest validation loss (losses of stages with other lengths cannot be compared).

    Loss and stage are `eval_loss` and `stage` of the meta; a checkpoint without them is never among the best.
    """

    keep_last: int
    keep_every: int | None = None
    keep_best: int = 0

    def apply(self, folder: Path, protect: Accept = is_good) -> None:
        """Removes all other checkpoints, except the one that `latest` names and the newest whose meta `protect` agrees
        to. Checkpoints that `Marks` names count for nothing; those newer than all others stay, because training has not
        come past them yet. Raises OSError when the file system refuses to remove one."""
        metas = {path: _meta(path) for _, path in published(folder)}  # oldest first
        marks = Marks.read(folder)
        usable = [path for path, meta in metas.items() if meta is None or marks.reason(meta) is None]
        pointer = folder / LATEST
        keep = set(usable[-self.keep_last :])
        keep |= set(list(metas)[list(metas).index(usable[-1]) :] if usable else metas)
        keep |= {folder / pointer.read_text(encoding="utf-8").strip()} if pointer.exists() else set()
        keep |= {path for step, path in published(folder) if self.keep_every and step % self.keep_every == 0}
        keep |= set([path for path in usable if (meta := metas[path]) is not None and protect(meta)][-1:])
        keep |= self._best(metas)
        for path in metas:
            if path not in keep:
                remove(hide(path))

    def _best(self, metas: dict[Path, dict[str, Any] | None]) -> set[Path]:
        """The checkpoints of lowest validation loss; among equal ones the newer."""
        stages: dict[str, list[tuple[float, Path]]] = {}
        for path, meta in reversed(metas.items()):
            loss = meta.get("eval_loss") if meta is not None else None
            if meta is not None and isinstance(loss, float) and math.isfinite(loss):
                stages.setdefault(str(meta.get("stage")), []).append((loss, path))
        ranked = (sorted(losses, key=lambda entry: entry[0]) for losses in stages.values())
        return {path for losses in ranked for _, path in losses[: self.keep_best]}


def _meta(path: Path) -> dict[str, Any] | None:
    """The meta of a checkpoint; None when it is damaged."""
    try:
        return read_meta(path)
    except CheckpointError:
        return None
