"""The checkpoints of one training run: save, resume, roll back."""

import logging
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.optim import Optimizer

from moba_train.checkpoint.checkpointer import Checkpointer, Saved
from moba_train.checkpoint.load import newest_intact
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.publish import Accept, is_finite, saved_step
from moba_train.checkpoint.publisher import Place
from moba_train.checkpoint.retention import Evaluated, Marks, Numbers, Retention
from moba_train.checkpoint.state import TrainingTensors, load_model_and_optimizer, reset_parameters
from moba_train.data.tokenizer import tokenizer_hash
from moba_train.errors import CheckpointError, LaunchError, TrainingError, UserError
from moba_train.health.node import Disk, disk_problem
from moba_train.memory.weights import checkpoint_bytes
from moba_train.model.spec import describe_sizes, new_kind_sizes
from moba_train.model.transformer import Transformer
from moba_train.parallel.world import World, broadcast
from moba_train.resolve.initial_weights import load_initial_weights
from moba_train.resolve.run import ResolvedRun, RunFolders
from moba_train.run.progress import Progress, data_plan
from moba_train.run.restarts import Restarts, check_first_start, choose_checkpoint, warn_of_lost_checkpoint
from moba_train.run.resumable import resumed_progress, run_then, unused_parameters
from moba_train.telemetry.telemetry import Telemetry

logger = logging.getLogger(__name__)

LAST_SAVE_S = 30.0
"""Seconds that a running save may take after an error; when a rank is gone, it never ends."""


class RunCheckpoints:
    """Saves a run's tensors and progress, and restores them. Constructed and called on all ranks together.

    A context manager: leaving it finishes the running save.
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
        checkpoint.fallback_dir that can take a checkpoint in its place.

        `check_lock` raises LaunchError on rank 0 when the run folder is not this run's any more (`RunLock.check`).
        """
        keep = run.checkpoint
        needed = checkpoint_bytes(run.setup.spec, run.optim.kind) if run.memory.saves else 0
        if problem := broadcast(_folders_problem(run.folders, keep.fallback_dir, needed) if world.is_main else None):
            raise LaunchError(problem)
        self.folder, *self._other_folders = run.folders.checkpoints
        self.saved_step = 0
        """Step of the newest checkpoint, complete or being saved; 0: none."""
        self.resumed_step = 0
        """Step of the checkpoint from which the run resumes; 0: none."""
        self._resumed_folder = self.folder
        """The folder that holds it."""
        self.resumed_recipe: str | None = None
        """The recipe that the checkpoint was saved with from which the run resumes."""
        self.loaded_weights: str | None = None
        """What `init_from` has given, as a sentence, at the first start of a run that has it."""
        self.begun_anew = ""
        """Which parameters the checkpoint that was loaded last did not have, as the end of a sentence; or nothing."""
        self.restarts = Restarts(run.folders.run) if world.is_main else None
        """The starts without progress; on rank 0."""
        self._start_id = broadcast(uuid.uuid4().hex[:8])
        self._saved_id = ""
        self._evaluated = Evaluated({})
        self.load_s = 0.0
        """Seconds that it took to find, verify and load the checkpoint from which the run resumes."""
        self.resumed_numbers: Numbers | None = None
        """What the evaluations found that were due at the checkpoint from which the run resumes; None where they must
        be run."""
        self._marks = Marks([])
        self._doubted: list[tuple[int, str]] = []
        """Step and save id of the marked checkpoints that the present weights go on from."""
        self._run = run
        self._tokenizer = tokenizer_hash(run.data.tokenizer) if run.data.tokenizer else ""
        self._model = model
        self._optimizer = optimizer
        self._tensors = TrainingTensors(model, optimizer)
        self._collected = False
        self._is_main = world.is_main
        self._check_lock = check_lock
        places = (Place(other, Retention(keep.keep_last), "checkpoint.fallback_dir") for other in self._other_folders)
        self._checkpointer = Checkpointer(
            self.folder,
            Retention(keep.keep_last, keep.keep_every, keep.keep_best),
            fallback=next(places, None),
            check_lock=check_lock,
            max_failures=keep.max_failures,
        )
        self._told_saves = 0
        """How many of the good saves are reported."""
        self._told_errors = 0
        """How many of the errors of saves are reported."""

    def start(self, from_scratch: bool = False) -> Progress:
        """Load the newest checkpoint that is intact and finite or, where there are no checkpoints, the weights of
        `init_from` if given; the progress there.

        Checkpoints that are marked are passed over. Raises CheckpointError when the recipe does not fit the checkpoint,
        when all are damaged or not finite, and, unless `from_scratch`, when there are none though there were;
        TrainingError when too many starts have made no progress.
        """
        began = time.monotonic()
        path = self._choose()
        try:
            progress = self._start_from(path, from_scratch)
            self.load_s = time.monotonic() - began
            if self._run.memory.saves:
                self._checkpointer.reserve(self._tensors())
            return progress
        except UserError:
            if self.restarts is not None:
                self.restarts.end_in_order()  # a recipe that does not fit: the run has not been tried
            raise

    def _start_from(self, path: Path | None, from_scratch: bool) -> Progress:
        if path is not None:
            progress = self.load(path)
            self.saved_step = self.resumed_step = progress.step
            self._resumed_folder = path.parent
            if self._is_main:
                folders = [self.folder, *self._other_folders]
                warn_of_lost_checkpoint(self._run.folders.run, folders, progress.step)
            if from_scratch and self._is_main:
                text = "--from-scratch changes nothing: the run goes on from %s; %s"
                logger.warning(text, path, "to begin at step 0, move its checkpoints away")
            meta = read_meta(path)
            self._saved_id = meta.get("save_id", "")
            self.resumed_recipe = meta.get("config")
            self._evaluated = Evaluated.read(self.folder) if self._is_main else Evaluated({})
            self.resumed_numbers = broadcast(self._evaluated.numbers(meta))
        else:
            check_first_start(self._run.folders.run, from_scratch)
            if self._run.init_from is not None:
                self.loaded_weights = load_initial_weights(self._model, Path(self._run.init_from))
            progress = Progress(run_id=broadcast(uuid.uuid4().hex[:8]))
        return progress

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

    def is_resumable(self, meta: dict[str, Any]) -> bool:
        """Whether the run would go on from an intact checkpoint with this meta: finite, and not marked."""
        return _why_not_resume_from(meta) is None and self._marks.reason(meta) is None

    def _choose(self) -> Path | None:
        """The checkpoint to start from; records the start."""
        self._marks = broadcast(Marks.read(self.folder) if self.restarts is not None else Marks([]))

        def blames(step: int) -> str | None:
            return broadcast(self.restarts.blames(step) if self.restarts is not None else None)

        path = choose_checkpoint(self._newest_to_resume_from, self._marks, blames, self._mark)
        step = (saved_step(read_meta(path)) or 0) if path is not None else 0
        problem = None
        if self.restarts is not None and self._run.memory.saves:  # else none can save anything
            most = self._run.health.max_restarts_without_progress
            problem = self.restarts.begin(step, self._marks.steps, most)
        if problem := broadcast(problem):
            raise TrainingError(problem)
        return path

    def _mark(self, meta: dict[str, Any], reason: str) -> None:
        step = saved_step(meta)
        if step is None:
            return
        if self._marks.add(step, meta.get("save_id", ""), reason) and self.restarts is not None:
            self._marks.write(self.folder)
            logger.warning("The checkpoint of step %d is passed over from now on: %s", step, reason)

    def doubt(self, reason: str) -> bool:
        """Mark the newest checkpoint, so that nothing goes on from it; False if there is none, or it is marked."""
        if not self.saved_step or not self._marks.add(self.saved_step, self._saved_id, reason):
            return False
        self._doubted.append((self.saved_step, self._saved_id))
        if self.restarts is not None:
            self._marks.write(self.folder)
        return True

    def trust_again(self) -> list[int]:
        """Take back every `doubt` since the last `load`: a step was applied to these weights, and its values were
        finite. Returns the steps of the checkpoints."""
        steps = [step for step, _ in self._doubted]
        for step, save_id in self._doubted:
            self._marks.remove(step, save_id)
        self._doubted.clear()
        if steps and self.restarts is not None:
            self._marks.write(self.folder)
        return steps

    def wait(self) -> None:
        """Wait until the newest checkpoint is complete or has failed. Called on every rank."""
        self._checkpointer.wait()

    def last_finite(self) -> tuple[int, Path] | None:
        """Step and folder of the last checkpoint that this start has saved without values that are not finite, else of
        the one from which it resumed; None where there is neither. Waits for the running save. Called on all ranks
        together, which get rank 0's answer."""
        self.wait()
        resumed = (self.resumed_step, self._resumed_folder) if self.resumed_step else None
        saved = [(save.step, save.folder) for save in self._checkpointer.saves if not save.not_finite]
        return broadcast(saved[-1] if saved else resumed)

    def newest(self, accept: Accept) -> Path:
        """The newest intact checkpoint that is not marked and whose meta `accept` accepts. Raises CheckpointError when
        there is none."""
        self.wait()
        path = newest_intact(self.folder, self._marks.accept(accept), *self._other_folders)
        if path is None:
            raise CheckpointError(f"{self.folder} is empty")
        return path

    def load(self, path: Path) -> Progress:
        """Restore weights, optimizer and random state, and return the progress that they were saved with.

        Parameters of attention kinds that no stage up to there uses begin anew where the checkpoint does not have them
        in their shape: stages that have not begun may have changed since. Raises CheckpointError when the recipe cannot
        go on from there.
        """
        meta = read_meta(path)
        spec = self._run.setup.spec
        progress = resumed_progress(self._run, meta, self._tokenizer, str(path))
        run = run_then(meta)
        then = run.setup.spec if run is not None else None
        unused = unused_parameters(spec, then, progress)
        reset_parameters(self._model, self._optimizer, unused, self._run.seed)
        load_model_and_optimizer(self._model, self._optimizer, path, unused=unused)
        self._doubted.clear()  # steps of other weights say nothing about those checkpoints: they stay marked
        new = new_kind_sizes(then, spec) if then is not None else {}
        self.begun_anew = (
            f"; {describe_sizes(new)} begin anew: the checkpoint does not have them in this shape" if new else ""
        )
        return progress

    def save(self, progress: Progress, facts: dict[str, object], protect: Accept) -> float:
        """Begin to save the state after `progress.step`, with `facts` in the meta.

        The newest old checkpoint that `protect` accepts is not deleted. Returns the seconds for which it waited for the
        save before. Raises LaunchError when that one found the run folder gone or taken over by another run,
        CheckpointError when it was one failed save too many.
        """
        run = self._run
        stages = run.after_exit(progress.exited_steps).stages[: progress.stage + 1]
        progress.data_plan = data_plan(run.setup.shape, run.data, run.seed, stages)
        progress.tokenizer = self._tokenizer
        self._saved_id = f"{self._start_id}-{progress.step}"
        identity = {"save_id": self._saved_id}
        meta = {"progress": progress.to_meta(), "config": run.recipe, **identity, **facts}
        waited = self._checkpointer.save(progress.step, self._tensors(), meta, protect)
        self.saved_step = progress.step
        return waited

    def evaluated(self, step: int, numbers: Numbers) -> None:
        """Note what the evaluations after `step` have found, if its checkpoint was saved before them, in a run folder
        that is still this run's."""
        if step == self.saved_step and self._saved_id and self._is_main and self._lock_problem() is None:
            self._evaluated.add(step, self._saved_id, numbers)
            self._evaluated.write(self.folder)

    @property
    def last_save_s(self) -> float | None:
        """How long the last good save of this start took; None before the first."""
        saved = self._checkpointer.last_saved
        return saved.seconds if saved is not None else None

    def before_update(self) -> None:
        """Call this before every change of the weights, after the first forward pass."""
        if not self._collected:
            self._tensors()  # the first pass has moved the tensors: collected here, the first save is not slower
            self._collected = True
        self._checkpointer.before_update()

    @property
    def wants_to_stop(self) -> bool:
        """Whether this rank is rank 0 and knows of an error that must end the run; `save` and `finish` then raise it on
        all ranks. What another rank takes for such an error would stop the run without one."""
        return self._is_main and self._checkpointer.fatal is not None

    def report(self, telemetry: Telemetry, step: int, tokens: int) -> None:
        """Report once how the saves so far have ended; the run goes on in any case."""
        saves = self._checkpointer.saves[self._told_saves :]
        errors = self._checkpointer.errors[self._told_errors :]
        self._told_saves += len(saves)
        self._told_errors += len(errors)
        for saved in saves:
            _report_saved(telemetry, step, tokens, saved)
        if not errors or isinstance(self._checkpointer.fatal, LaunchError):
            return
        for error in errors:
            telemetry.event(step, tokens, "warning", error)
            telemetry.alert("a checkpoint was not saved", error, "checkpoint")
        self._report_failures_in_a_row(telemetry, step, tokens)

    def _report_failures_in_a_row(self, telemetry: Telemetry, step: int, tokens: int) -> None:
        failed = self._checkpointer.failed_saves
        if failed < self._run.checkpoint.alert_after_failures:
            return
        saved = self._checkpointer.last_saved
        last = f"after step {saved.step}" if saved is not None else "since this start of the run"
        text = f"{failed} saves in a row have failed: all that is trained {last} is lost if the run ends now"
        if self._is_main:
            logger.error("%s", text)
        telemetry.event(step, tokens, "warning", text, failed_saves=failed)
        telemetry.alert("no checkpoint can be saved", text, "failed_saves")

    def finish(self, telemetry: Telemetry, step: int, tokens: int, protect: Accept) -> None:
        """Wait for the last save and report it. Raises CheckpointError when it failed, LaunchError when the run folder
        is gone or belongs to another run. `protect`: see `save`."""
        self._checkpointer.wait()
        if problem := broadcast(self._lock_problem()):
            raise LaunchError(problem)
        self.report(telemetry, step, tokens)
        self._checkpointer.raise_fatal()
        if self._run.checkpoint.keep_best:
            self._checkpointer.remove_old(protect)  # the last evaluation may have come after the last save
        if (error := self._checkpointer.last_error) is not None:
            raise CheckpointError(f"{error}; remove the cause and run the same command again")

    def _lock_problem(self) -> str | None:
        try:
            self._check_lock()
        except LaunchError as error:
            return str(error)
        except OSError as error:
            logger.warning("whether the run folder is still this run's cannot be told: %s", error)
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.restarts is not None and self._lock_problem() is None:  # else the folder is another run's
            if error is None:
                self.restarts.end_in_order()
            else:
                self.restarts.end(f"{type(error).__name__}: {error}")
        all_ranks_end = error is None or isinstance(error, TrainingError | CheckpointError)
        self._checkpointer.close(None if all_ranks_end else LAST_SAVE_S)


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
    """Create the folder; why it cannot take `needed` bytes, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return str(error)
    problem = disk_problem(Disk(folder, needed))
    return problem.text if problem else None


def _why_not_resume_from(meta: dict[str, Any]) -> str | None:
    """Why a run must not go on from an intact checkpoint with this meta; None if it may."""
    return None if is_finite(meta) else f"holds {_not_finite(meta['not_finite'])}"


def _not_finite(names: Any) -> str:
    """What is wrong with the tensors of these names; a meta from elsewhere may hold anything in place of a list."""
    listed = names if isinstance(names, list) else [names]
    shown = ", ".join(map(str, listed[:3])) + ", ..." * (len(listed) > 3)
    return f"NaN or infinite values in {shown}"


def _report_saved(telemetry: Telemetry, step: int, tokens: int, saved: Saved) -> None:
    message = f"the checkpoint of step {saved.step} is complete after {saved.seconds:.1f} s"
    times = {"checkpoint_save_s": saved.seconds, "checkpoint_check_s": saved.check_s}
    telemetry.event(step, tokens, "checkpoint", message, **times)
    if saved.problem is not None:
        text = f"the checkpoint of step {saved.step} is in {saved.folder}, because elsewhere it failed: {saved.problem}"
        telemetry.event(step, tokens, "warning", text)
        telemetry.alert("a checkpoint is in checkpoint.fallback_dir", text, "checkpoint_fallback")
    if saved.not_finite:
        values = _not_finite(saved.not_finite)
        text = f"the checkpoint of step {saved.step} holds {values}; the run will not resume from it"
        telemetry.event(step, tokens, "warning", text)
        telemetry.alert("a checkpoint is not finite", text, "not_finite")
