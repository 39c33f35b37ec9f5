"""The checkpoints of one training run: save, resume, roll back."""

import logging
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch.optim import Optimizer

from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import newest_intact
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_finite, saved_step
from moba_train.checkpoint.publisher import Place
from moba_train.checkpoint.retention import Evaluated, Numbers, Retention
from moba_train.checkpoint.state import TrainingTensors, load_model_and_optimizer, reset_parameters
from moba_train.config.stages import Stage
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import CheckpointError, LaunchError, TrainingError, UnusableFolderError, UserError
from moba_train.foreign_files import local_path
from moba_train.health.node import Disk, disk_problem
from moba_train.memory.weights import checkpoint_bytes
from moba_train.model.spec import describe_sizes, new_kind_sizes
from moba_train.model.transformer import Transformer
from moba_train.output_files import remove_leftovers
from moba_train.parallel.world import World, broadcast
from moba_train.resolve.initial_weights import load_initial_weights
from moba_train.resolve.run import ResolvedRun, RunFolders
from moba_train.run.progress import Progress, data_plan
from moba_train.run.restarts import Trust, check_first_start, warn_of_lost_checkpoint
from moba_train.run.resumable import resumed_progress, run_then, unused_parameters

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds for which ranks wait at a time for the store of rank 0; a collective that waits longer would time out."""
LAST_SAVE_S = 30.0
"""Seconds that a running save may take after an error; when a rank is gone, it never ends."""


@dataclass(frozen=True)
class Start:
    """State with which a start of the run begins: from a checkpoint, with the weights of `init_from`, or new."""

    progress: Progress
    step: int = 0
    """Step of the checkpoint from which the run resumes; 0: none."""
    folder: Path | None = None
    """The folder that holds the checkpoint."""
    recipe: str | None = None
    """The recipe that the checkpoint was saved with."""
    numbers: Numbers | None = None
    """Numbers of the evaluations that were due at the checkpoint; None where they must be run."""
    note: str = ""
    """End of a sentence about parameters that begin again because the checkpoint did not have them (`Loaded`)."""
    initial_weights: str = ""
    """Sentence about the weights that `init_from` has given; empty: none."""
    seconds: float = 0.0
    """Seconds that it took to find, verify and load the checkpoint."""


class CheckpointStore(Protocol):
    """A place elsewhere that gets a copy of every checkpoint, in the background. Used on rank 0.

    A registered store (entry point group `moba_train.checkpoint_stores`) is a class of (options, folders), which begins
    to fetch its newest copy into the run's folder unless that has a newer checkpoint, with the class methods
    `problem(options)`, as of a sink, and `local_copy(address)`, the path on this machine of a copy of what is at the
    address.
    """

    def copy(self, path: Path) -> None:
        """Begin to copy the checkpoint, or begin again where an earlier start was killed."""

    def is_idle(self, wait_s: float) -> bool:
        """True if all that was begun has ended, after waiting at most `wait_s` seconds for it. Raises UserError when
        the copy that the run needs could not be fetched."""

    def news(self) -> list[tuple[str, bool]]:
        """Sentences about copies since the last call, each with false where the copy has failed."""


class Loaded(NamedTuple):
    """Progress of a checkpoint whose tensors have been loaded."""

    progress: Progress
    note: str
    """End of a sentence about the parameters that the checkpoint did not have and that begin again; or empty."""


class RunCheckpoints:
    """Saves a run's tensors and progress, and restores them. Constructed and called on all ranks together.

    A context manager: leaving it finishes the running save, and ends the start of the run.
    """

    def __init__(
        self,
        run: ResolvedRun,
        model: Transformer,
        optimizer: Optimizer,
        world: World,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the run folder. Raises LaunchError when it cannot be written or its disk is too full, and there is no
        checkpoint.fallback_dir that can take a checkpoint instead.

        `check_lock` raises LaunchError on rank 0 when the run folder is not this run's any more (`RunLock.check`).
        """
        keep = run.checkpoint
        needed = checkpoint_bytes(run.setup.spec, run.optim.kind) if run.memory.saves else 0
        if problem := broadcast(_folders_problem(run.folders, keep.fallback_dir, needed) if world.is_main else None):
            raise UnusableFolderError(problem)
        self._run = run
        self._model = model
        self._optimizer = optimizer
        self._tensors = TrainingTensors(model, optimizer)
        self._collected = False
        self._is_main = world.is_main
        self._check_lock = check_lock
        self._tokenizer = tokenizer_hash(run.data.tokenizer) if run.data.tokenizer else ""
        self.folder, *self._other_folders = run.folders.checkpoints
        self.trust = Trust(run.folders.run, self.folder, world.is_main)
        self.begun = Start(Progress())
        """The beginning of this start, once `start` has found it."""
        self.saved_step = 0
        """Step of the newest checkpoint, complete or being saved; 0: none."""
        self._saved_id = ""
        self._start_id = broadcast(uuid.uuid4().hex[:8])
        self._evaluated = Evaluated({})
        places = (Place(other, Retention(keep.keep_last), "checkpoint.fallback_dir") for other in self._other_folders)
        self.checkpointer = Checkpointer(
            self.folder,
            Retention(keep.keep_last, keep.keep_every, keep.keep_best),
            fallback=next(places, None),
            check_lock=check_lock,
            max_failures=keep.max_failures,
            saved=self._copy,
        )
        # Behind the checkpointer, which removes unfinished checkpoints, such as one that is being fetched.
        asked = keep.asked_for() if world.is_main and run.memory.saves else []
        self.stores: list[CheckpointStore] = [store(options, run.folders) for _, store, options in asked]

    def start(self, from_scratch: bool = False) -> Start:
        """Load the newest checkpoint that is intact and finite or, where there are no checkpoints, the weights of
        `init_from` if given.

        Checkpoints that are marked are passed over. Raises CheckpointError when the recipe does not fit the checkpoint,
        when all are damaged or not finite, and, unless `from_scratch`, when there are none though there were;
        TrainingError when too many starts have made no progress.
        """
        began = time.monotonic()
        self._wait_for_stores()
        # Without saves no start can make progress.
        path = self.trust.begin(self._newest_to_resume_from, self._run.memory.saves)
        try:
            found = self._resume(path, from_scratch) if path is not None else self._first_start(from_scratch)
            self.begun = replace(found, seconds=time.monotonic() - began)
            if path is not None and read_meta(path)["progress"]["run_id"] == found.progress.run_id:
                self._copy(path)  # an earlier start may have been killed before it was copied
            if self._run.memory.saves:
                # Page-locking takes about a second for every five GB, which the first save would otherwise wait for.
                self.checkpointer.reserve(self._tensors())
            return self.begun
        except UserError:
            self.trust.end(None)  # a recipe that does not fit: the run has not been tried
            raise

    def _resume(self, path: Path, from_scratch: bool) -> Start:
        if self._model.adapters is not None and self._run.init_from is not None:
            load_initial_weights(self._model, local_path(self._run.init_from))  # the base, which is not saved
        progress, note = self.load(path)
        self.saved_step = progress.step
        if self._is_main:
            folders = [self.folder, *self._other_folders]
            warn_of_lost_checkpoint(self._run.folders.run, folders, progress.step)
            if from_scratch:
                text = "--from-scratch changes nothing: the run goes on from %s; %s"
                logger.warning(text, path, "to begin at step 0, move its checkpoints away")
            self._evaluated = Evaluated.read(self.folder)
        meta = read_meta(path)
        threads = torch.get_num_threads()
        if self._is_main and meta.get("threads", threads) != threads and not torch.cuda.is_available():
            text = "%d threads of the CPU, but %s when %s was saved: sums round differently (OMP_NUM_THREADS)"
            logger.warning(text, threads, meta["threads"], path)
        self._saved_id = meta.get("save_id", "")
        numbers = broadcast(self._evaluated.numbers(meta))
        return Start(progress, progress.step, path.parent, meta.get("config"), numbers, note)

    def _first_start(self, from_scratch: bool) -> Start:
        check_first_start(self._run.folders.run, from_scratch)
        progress = Progress(run_id=broadcast(uuid.uuid4().hex[:8]))
        if self._run.init_from is None:
            return Start(progress)
        return Start(progress, initial_weights=load_initial_weights(self._model, local_path(self._run.init_from)))

    def _newest_to_resume_from(self, accept: Accept) -> Path | None:
        """The newest intact and finite checkpoint that `accept` accepts; None when there are no checkpoints."""
        passed_over: list[str] = []

        def is_wanted(meta: dict[str, Any]) -> bool:
            problem = _why_not_resume_from(meta)
            if problem is not None:
                passed_over.append(f"the checkpoint of step {saved_step(meta)} {problem}")
            return problem is None and accept(meta)

        try:
            path = newest_intact(self.folder, is_wanted, *self._other_folders)
        except CheckpointError as error:
            if not passed_over:
                raise
            # Of the same type: a caller may not take a checkpoint that could not be read for a damaged one.
            raise type(error)("\n".join([str(error), *(f"  - {text}" for text in passed_over)])) from error
        for text in passed_over if self._is_main else []:
            logger.warning("Passing over a checkpoint and taking the one before: %s", text)
        return path

    def load(self, path: Path) -> Loaded:
        """Restore weights, optimizer and random state, and return the progress that they were saved with.

        Parameters of attention kinds that no stage up to there uses begin again where the checkpoint does not have them
        in their shape: stages that have not begun may have changed since. Raises CheckpointError when the recipe cannot
        go on from there.
        """
        meta = read_meta(path)
        spec = self._run.setup.spec
        progress = resumed_progress(self._run, meta, self._tokenizer, str(path))
        saved_run = run_then(meta)
        then = saved_run.setup.spec if saved_run is not None else None
        unused = unused_parameters(spec, then, progress)
        reset_parameters(self._model, self._optimizer, unused, self._run.seed)
        load_model_and_optimizer(self._model, self._optimizer, path, unused=unused)
        if self._model.adapters is not None:
            self._model.adapters.check()
        self.trust.loaded()
        new = new_kind_sizes(then, spec) if then is not None else {}
        note = f"; {describe_sizes(new)} begin again: the checkpoint does not have them in this shape" if new else ""
        return Loaded(progress, note)

    def is_resumable(self, meta: dict[str, Any]) -> bool:
        """True if the run would go on from an intact checkpoint with this meta: finite, and not passed over."""
        return _why_not_resume_from(meta) is None and self.trust.reason(meta) is None

    def newest(self, accept: Accept) -> Path:
        """The newest intact checkpoint that is not passed over and whose meta `accept` accepts. Raises CheckpointError
        when there is none."""
        self.checkpointer.wait()
        path = newest_intact(self.folder, self.trust.accept(accept), *self._other_folders)
        if path is None:
            raise CheckpointError(f"{self.folder} is empty")
        return path

    def last_finite(self) -> tuple[int, Path] | None:
        """Step and folder of the last checkpoint that this start has saved without values that are not finite, else of
        the one from which it resumed; None where there is neither. Waits for the running save. Called on all ranks
        together, which get rank 0's answer."""
        self.checkpointer.wait()
        resumed = (self.begun.step, self.begun.folder) if self.begun.folder is not None else None
        saved = [(save.step, save.folder) for save in self.checkpointer.saves if not save.not_finite]
        return broadcast(saved[-1] if saved else resumed)

    def doubt(self, reason: str) -> bool:
        """Pass over the newest checkpoint from now on; False if there is none, or it is passed over already."""
        return bool(self.saved_step) and self.trust.doubt(self.saved_step, self._saved_id, reason)

    def save(
        self, progress: Progress, stage: Stage, detector: dict[str, Any], facts: dict[str, object], protect: Accept
    ) -> float:
        """Begin to save the state after `progress.step`, in `stage`.

        detector: state of the spike detector
        facts: further entries of the checkpoint's meta
        protect: accepts checkpoints of which the newest is not deleted

        Returns the seconds for which it waited for the save before. Raises LaunchError when that one found the run
        folder gone or taken over by another run, CheckpointError when it was one failed save too many.
        """
        run = self._run
        stages = run.after_exit(progress.exited_steps).stages[: progress.stage + 1]
        plan = data_plan(run.setup.shape, run.data, run.seed, stages)
        progress.prepare_save(stage, plan, self._tokenizer, detector)
        # A later start may save the same step again, and that is another checkpoint.
        self._saved_id = f"{self._start_id}-{progress.step}"
        meta = facts | {"progress": progress.to_meta(), "config": run.recipe, "save_id": self._saved_id}
        meta |= {"stage": stage.name, "threads": torch.get_num_threads()}
        waited = self.checkpointer.save(progress.step, self._tensors(), meta, protect)
        self.saved_step = progress.step
        return waited

    def before_update(self) -> None:
        """Call this before every change of the weights, after the first forward pass."""
        if not self._collected:
            self._tensors()  # the first pass has moved the tensors: collected here, the first save is not slower
            self._collected = True
        self.checkpointer.before_update()

    def evaluated(self, step: int, numbers: Numbers) -> None:
        """Note the numbers of the evaluations after `step`, if its checkpoint was saved before them, in a run folder
        that is still this run's."""
        if step == self.saved_step and self._saved_id and self._is_main and self._lock_problem() is None:
            self._evaluated.add(step, self._saved_id, numbers)
            self._evaluated.write(self.folder)

    @property
    def last_save_s(self) -> float | None:
        """Seconds that the last good save of this start took; None before the first."""
        saved = self.checkpointer.last_saved
        return saved.seconds if saved is not None else None

    @property
    def wants_to_stop(self) -> bool:
        """True if this rank is rank 0 and knows of an error that must end the run; `save` and `finish` then raise it on
        all ranks. What another rank takes for such an error would stop the run without one."""
        return self._is_main and self.checkpointer.fatal is not None

    def wait_for_last(self) -> None:
        """Wait for the last save. Raises LaunchError when the run folder is gone or belongs to another run."""
        self.checkpointer.wait()
        if problem := broadcast(self._lock_problem()):
            raise LaunchError(problem)

    def finish(self, protect: Accept) -> None:
        """End after the last save, which is complete or has failed. Raises CheckpointError when it failed, and an error
        that an earlier save met. `protect`: see `save`."""
        self.checkpointer.raise_fatal()
        if self._run.checkpoint.keep_best:
            self.checkpointer.remove_old(protect)  # the last evaluation may have come after the last save
        if (error := self.checkpointer.last_error) is not None:
            raise CheckpointError(f"{error}; remove the cause and run the same command again")

    def _copy(self, path: Path) -> None:
        for store in self.stores:
            store.copy(path)

    def _wait_for_stores(self) -> None:
        while not broadcast(all(store.is_idle(_POLL_S) for store in self.stores)):
            pass

    def _lock_problem(self) -> str | None:
        try:
            self._check_lock()
        except LaunchError as error:
            return str(error)
        except OSError as error:
            logger.warning("It is not known if the run folder is still this run's: %s", error)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_main and self._lock_problem() is None:  # else the folder is another run's
            self.trust.end(error)
        # After such errors every rank comes here, so that the running save can end; after any other a rank may be gone.
        all_ranks_end = error is None or isinstance(error, TrainingError | CheckpointError)
        self.checkpointer.close(None if all_ranks_end else LAST_SAVE_S)
        if all_ranks_end:
            self._wait_for_stores()


def _folders_problem(folders: RunFolders, fallback: str | None, needed: int) -> str | None:
    """Create the run folder; the reason why no checkpoint, of `needed` bytes, can be saved there or in
    checkpoint.fallback_dir, or None. A problem of the run folder alone is a warning: its checkpoints go to the
    fallback."""
    problem = _folder_problem(folders.run, needed)
    if problem is None:
        return None
    text = f"run_dir {folders.run} cannot be used: {problem}"
    if fallback is None:
        return text
    if also := _folder_problem(Path(fallback), needed):
        return f"{text}; nor can checkpoint.fallback_dir {fallback}: {also}"
    logger.warning("%s; checkpoints that it does not take go to checkpoint.fallback_dir", text)
    return None


def _folder_problem(folder: Path, needed: int) -> str | None:
    """Create the folder; the reason why it cannot take `needed` bytes, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            remove_leftovers(folder)
    except OSError as error:
        return str(error)
    problem = disk_problem(Disk(folder, needed))
    return problem.text if problem else None


def _why_not_resume_from(meta: dict[str, Any]) -> str | None:
    """Reason why a run must not go on from an intact checkpoint with this meta; None if it may."""
    return None if is_finite(meta) else f"holds {not_finite_values(meta['not_finite'])}"


def not_finite_values(names: Any) -> str:
    """Phrase about the tensors of these names; a meta from elsewhere may hold anything instead of a list."""
    listed = names if isinstance(names, list) else [names]
    shown = ", ".join(map(str, listed[:3])) + ", ..." * (len(listed) > 3)
    return f"NaN or infinite values in {shown}"
