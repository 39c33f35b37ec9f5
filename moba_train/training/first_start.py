"""Checkpoints that a run has had and that are not found: whether it may begin at step 0, or go on from an older one."""

import contextlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from moba_train.checkpoint.publish import LATEST
from moba_train.errors import CheckpointError
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
    """What says that the run has had a checkpoint, or may have had one; None where it has had none."""
    latest = run_dir / "checkpoints" / LATEST
    with contextlib.suppress(OSError):
        return f"has had one: {latest} names {latest.read_text(encoding='utf-8', errors='replace').strip()}"
    metrics = run_dir / "metrics.jsonl"
    try:
        for record in read_backward(metrics):
            if record["type"] == "resume" or "checkpoint_save_s" in record:
                return f"has had one: {metrics} says, at step {record['step']}: {record.get('message')}"
    except OSError as error:
        return f"may have had one: {metrics}, which would say so, cannot be read: {error.strerror or error}"
    return None
