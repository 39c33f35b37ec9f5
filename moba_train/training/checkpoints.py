"""The checkpoints of one training run: save, resume, roll back."""

import logging
import shutil
import tempfile
import uuid
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from moba_train.checkpoint.checkpointer import Checkpointer
from moba_train.checkpoint.load import newest_intact
from moba_train.checkpoint.manifest import read_meta
from moba_train.checkpoint.marks import Marks
from moba_train.checkpoint.publish import Accept
from moba_train.checkpoint.retention import Retention
from moba_train.checkpoint.state import TrainingTensors, load_model_and_optimizer
from moba_train.config.load import dump_config
from moba_train.config.schema import RunConfig
from moba_train.config.stages import used_kinds
from moba_train.convert.initial_weights import load_initial_weights
from moba_train.errors import CheckpointError, LaunchError, TrainingError, UserError
from moba_train.model.build import kind_of_parameter
from moba_train.model.transformer import Transformer
from moba_train.optim.registry import OPTIMIZERS
from moba_train.parallel.world import World, broadcast
from moba_train.telemetry.telemetry import Telemetry
from moba_train.training.progress import Progress, check_resumable, data_plan
from moba_train.training.restarts import Restarts, choose_checkpoint

logger = logging.getLogger(__name__)

LAST_SAVE_S = 30.0
"""Seconds that a running save may take after an error; when a rank is gone, it never ends."""


class RunCheckpoints:
    """Saves a run's tensors and progress, and restores them. Constructed and called on all ranks together.

    A context manager: leaving it finishes the running save.
    """

    def __init__(self, config: RunConfig, model: Transformer, optimizer: Optimizer, world: World) -> None:
        """Create the run folder. Raises LaunchError when it cannot be written, or its disk is too small."""
        run_dir = Path(config.run_dir)
        keep = config.checkpoint
        if problem := broadcast(_folder_problem(run_dir, model, config) if world.is_main else None):
            raise LaunchError(f"run_dir {run_dir} cannot be used: {problem}")
        self.folder = run_dir / "checkpoints"
        self.saved_step = 0
        """Step of the newest checkpoint, complete or being saved; 0: none."""
        self.restarts = Restarts(run_dir) if world.is_main else None
        """The starts without progress; on rank 0."""
        self._start_id = broadcast(uuid.uuid4().hex[:8])
        self._saved_id = ""
        self._marks = Marks([])
        self._doubted: list[tuple[int, str]] = []
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._tensors = TrainingTensors(model, optimizer)
        self._collected = False
        self._checkpointer = Checkpointer(self.folder, Retention(keep.keep_last, keep.keep_every, keep.keep_best))
        self._reported: tuple[int, float] | None = None
        self._failed: str | None = None

    def start(self) -> Progress:
        """Load the newest intact checkpoint or, without any, the weights of `init_from` if given; the progress there.

        Checkpoints that are marked are passed over. Raises CheckpointError when the recipe does not fit the checkpoint,
        TrainingError when too many starts have made no progress.
        """
        path = self._choose()
        try:
            return self._start_from(path)
        except UserError:
            if self.restarts is not None:
                self.restarts.end_in_order()  # a recipe that does not fit: the run has not been tried
            raise

    def _start_from(self, path: Path | None) -> Progress:
        if path is not None:
            progress = self.load(path, with_new_kinds=True)
            self.saved_step = progress.step
            self._saved_id = read_meta(path).get("save_id", "")
        else:
            if self._config.init_from is not None:
                load_initial_weights(self._model, Path(self._config.init_from))
            progress = Progress(run_id=broadcast(uuid.uuid4().hex[:8]))
        self._checkpointer.reserve(self._tensors())
        return progress

    def _choose(self) -> Path | None:
        """The checkpoint to start from; records the start."""
        self._marks = broadcast(Marks.read(self.folder) if self.restarts is not None else Marks([]))

        def blames(step: int) -> str | None:
            return broadcast(self.restarts.blames(step) if self.restarts is not None else None)

        path = choose_checkpoint(partial(newest_intact, self.folder), self._marks, blames, self._mark)
        step = read_meta(path)["progress"]["step"] if path is not None else 0
        problem = None
        if self.restarts is not None:
            most = self._config.health.max_restarts_without_progress
            problem = self.restarts.begin(step, self._marks.steps, most)
        if problem := broadcast(problem):
            raise TrainingError(problem)
        return path

    def _mark(self, meta: dict[str, Any], reason: str) -> None:
        step = meta["progress"]["step"]
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

    def trust_again(self) -> None:
        """Take back every `doubt`: a step was applied to these weights, and its values were finite."""
        if not self._doubted:
            return
        for step, save_id in self._doubted:
            self._marks.remove(step, save_id)
        self._doubted.clear()
        if self.restarts is not None:
            self._marks.write(self.folder)

    def newest(self, accept: Accept) -> Path:
        """The newest intact checkpoint that is not marked and whose meta `accept` accepts. Raises CheckpointError when
        there is none."""
        self._checkpointer.wait()  # the newest one may still be being saved
        path = newest_intact(self.folder, self._marks.accept(accept))
        if path is None:
            raise CheckpointError(f"{self.folder} is empty")
        return path

    def load(self, path: Path, with_new_kinds: bool = False) -> Progress:
        """Restore weights, optimizer and random state, and return the progress that they were saved with.

        `with_new_kinds`: parameters of attention kinds that no stage has used so far may be missing, because the recipe
        got a new later stage; they keep their initial values. Raises CheckpointError when the recipe cannot go on from
        there.
        """
        progress = Progress.from_meta(read_meta(path).get("progress"), len(self._config.stages))
        check_resumable(self._config, progress, str(path))
        unused = self._parameters_unused_until(progress.stage) if with_new_kinds else []
        load_model_and_optimizer(self._model, self._optimizer, path, optional=unused)
        return progress

    def _parameters_unused_until(self, stage: int) -> list[str]:
        """Parameters of attention kinds that no stage up to this one uses in their layer."""
        used = {f"blocks.{layer}.attention.{kind}." for layer, kind in used_kinds(self._config, stage)}
        names = [name for name, _ in self._model.named_parameters() if kind_of_parameter(name)]
        return [name for name in names if not name.startswith(tuple(used))]

    def save(self, progress: Progress, facts: dict[str, object], protect: Accept) -> float:
        """Begin to save the state after `progress.step`, with `facts` in the meta.

        The newest old checkpoint that `protect` accepts is not deleted. Returns the seconds for which it waited for the
        save before.
        """
        progress.data_plan = data_plan(self._config, progress)
        self._saved_id = f"{self._start_id}-{progress.step}"
        identity = {"save_id": self._saved_id}
        meta = {"progress": progress.to_meta(), "config": dump_config(self._config), **identity, **facts}
        waited = self._checkpointer.save(progress.step, self._tensors(), meta, protect)
        self.saved_step = progress.step
        return waited

    def before_update(self) -> None:
        """Call this before every change of the weights, after the first forward pass."""
        if not self._collected:
            self._tensors()  # the first pass has moved the tensors: collected here, the first save is not slower
            self._collected = True
        self._checkpointer.before_update()

    def report(self, telemetry: Telemetry, step: int, tokens: int) -> None:
        """Report once how the last save ended; the run goes on in any case."""
        saved = self._checkpointer.last_saved
        error = self._checkpointer.last_error
        if saved is not None and saved != self._reported:
            message = f"the checkpoint of step {saved[0]} is complete after {saved[1]:.1f} s"
            telemetry.event(step, tokens, "checkpoint", message, checkpoint_save_s=saved[1])
        if error is not None and error != self._failed:
            telemetry.event(step, tokens, "warning", error)
            telemetry.alert("a checkpoint was not saved", error, "checkpoint")
        self._reported = saved
        self._failed = error

    def finish(self, telemetry: Telemetry, step: int, tokens: int) -> None:
        """Wait for the last save and report it. Raises CheckpointError when it failed."""
        self._checkpointer.wait()
        self.report(telemetry, step, tokens)
        if self._failed is not None:
            raise CheckpointError(f"{self._failed}; remove the cause and run the same command again")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.restarts is not None:
            if error is None:
                self.restarts.end_in_order()
            else:
                self.restarts.end(f"{type(error).__name__}: {error}")
        all_ranks_end = error is None or isinstance(error, TrainingError | CheckpointError)
        self._checkpointer.close(None if all_ranks_end else LAST_SAVE_S)


def _folder_problem(run_dir: Path, model: nn.Module, config: RunConfig) -> str | None:
    """Create the folder; why nothing can be saved there, or None."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
        free = shutil.disk_usage(run_dir).free
    except OSError as error:
        return str(error)
    each = 4 + OPTIMIZERS[config.optim.kind].state_bytes  # float32 weights and optimizer state
    needed = each * sum(parameter.numel() for parameter in model.parameters())
    return f"{free / 2**30:.2f} GiB free, one checkpoint needs {needed / 2**30:.2f} GiB" if free < needed else None
