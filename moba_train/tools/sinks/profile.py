"""`telemetry.profile`: what a few steps of some ranks do, as a trace for Perfetto, and a snapshot of GPU memory.

torch's profiler records operators, kernels and collectives by their names. Around these the trace has ranges of ours:
the step and its stage, the phases of the step, the forward pass of each layer, and attention. They are put around
the functions below only while a profile runs, so a step outside of it does nothing for them.
"""

import gzip
import logging
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch.profiler import ProfilerActivity, record_function

from moba_train import torch_private
from moba_train.attention import operators
from moba_train.config.base import Section
from moba_train.errors import UserError
from moba_train.health.watch import Watch
from moba_train.model.block import Block
from moba_train.output_files import make_folder, write_atomically
from moba_train.telemetry.telemetry import Record, SinkRun

logger = logging.getLogger(__name__)

MOST_STEPS = 100
"""Most steps of a profile; one of 32 layers has about 20 MB of events."""
MOST_ALLOCATIONS = 1_000_000
"""Allocations and frees in the memory snapshot, the last ones."""


class ProfileOptions(Section):
    """A profile of a few steps: a trace for Perfetto in the run folder, `profile/`, which says how long each operator,
    kernel, collective and layer takes. The other steps cost nothing."""

    steps: tuple[int, int] = Field(description="first and last step that are profiled, counted from 1")
    ranks: list[int] = Field([0], min_length=1, description="ranks that are profiled")
    memory: bool = Field(
        False, description="also record allocations: a snapshot of GPU memory; on a CPU, counters in the trace"
    )
    nvtx: bool = Field(
        False, description="instead of a trace, NVTX ranges for `nsys profile --capture-range cudaProfilerApi`"
    )

    @model_validator(mode="after")
    def _check_steps(self) -> "ProfileOptions":
        first, last = self.steps
        if not 1 <= first <= last < first + MOST_STEPS or min(self.ranks) < 0:
            raise ValueError(
                f"given steps [{first}, {last}] and ranks {self.ranks}; allowed: the first and last of at most "
                f"{MOST_STEPS} steps, from 1 on, and ranks from 0 on"
            )
        return self


class ProfileSink:
    """Profiles this rank from the beginning of the first step to the end of the last. A `Sink`."""

    Options = ProfileOptions
    on_every_rank = True

    @classmethod
    def problem(cls, options: ProfileOptions) -> str:
        """Reason why these ranges cannot be recorded here; empty: they can."""
        needs_gpu = options.nvtx and not torch.cuda.is_available()
        return "given nvtx: true, which needs a GPU; leave it out for a trace" if needs_gpu else ""

    @classmethod
    def describe(cls, options: ProfileOptions) -> str:
        """Words about the profile for the run's first lines."""
        return f"profile of steps {options.steps[0]} to {options.steps[1]}"

    @classmethod
    def open(cls, options: ProfileOptions, run: SinkRun) -> "ProfileSink":
        """The profile of this rank. Raises UserError, on every rank, for ranks that the run does not have."""
        ranks = dist.get_world_size()
        if beyond := [rank for rank in options.ranks if rank >= ranks]:
            raise UserError(f"telemetry.profile.ranks: given {beyond}; allowed: 0 to {ranks - 1}, the ranks of the run")
        return cls(options, run.folder / "profile", run.rank)

    def __init__(self, options: ProfileOptions, folder: Path, rank: int) -> None:
        self._options = options
        self._folder = folder
        self._rank = rank
        self._running = ExitStack()
        """Ends the profile, and is empty where none runs."""
        self._step = ExitStack()
        """Ends the range of the step."""
        self._done = rank not in options.ranks
        self._at = 0
        """The last of the steps that has begun, 0 before the first."""

    def begin_step(self, step: int, stage: str) -> None:
        """Begin or end the profile where that is due. A profile that fails is a warning: the run goes on."""
        first, last = self._options.steps
        if self._done or (step < first and not self._at):
            return
        try:
            self._step.close()
            if step > last or step <= self._at:  # a rollback: torch's profiler cannot begin twice
                self._end()
                return
            if step == first:
                self._begin()
            self._at = step
            self._step.enter_context(record_function(f"step {step}, stage {stage}"))
        except Exception as error:
            self._done = True
            logger.warning("telemetry.profile: %r; the run goes on without it", error)

    def write(self, record: Record) -> None:
        """Does nothing: a profile has no use for metrics."""

    def close(self) -> None:
        """End a profile in whose middle the run ends."""
        self._step.close()
        self._end()

    def _end(self) -> None:
        self._done = True
        self._running.close()

    def _begin(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(ranges())
            if self._options.nvtx:
                stack.enter_context(_nvtx())
            else:
                stack.enter_context(self._trace())
                if self._options.memory and torch.cuda.is_available():
                    stack.enter_context(self._snapshot())
            self._running = stack.pop_all()

    @contextmanager
    def _trace(self) -> Iterator[None]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with torch.profiler.profile(activities=activities, profile_memory=self._options.memory) as profile:
            yield
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            path = self._write("json.gz", gzip.compress(Path(file.name).read_bytes(), compresslevel=3))
        print(f"profile: {path}, to be opened at https://ui.perfetto.dev", flush=True)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        torch_private.record_memory(MOST_ALLOCATIONS)
        try:
            yield
            path = self._write("pickle", pickle.dumps(torch_private.recorded_memory()))
            print(f"profile: {path}, to be opened at https://docs.pytorch.org/memory_viz", flush=True)
        finally:
            torch_private.record_memory(None)

    def _write(self, suffix: str, content: bytes) -> Path:
        first, last = self._options.steps
        path = self._folder / f"steps_{first}-{last}_rank_{self._rank}.{suffix}"
        make_folder(self._folder)
        write_atomically(path, content)
        return path


@contextmanager
def _nvtx() -> Iterator[None]:
    with torch.autograd.profiler.emit_nvtx():
        torch.cuda.profiler.start()
        try:
            yield
        finally:
            torch.cuda.profiler.stop()


@contextmanager
def ranges() -> Iterator[None]:
    """Inside, the profiler sees a range for the forward pass of each layer, for attention (forward and backward, by
    the names that the operators have where they are used), and for each phase of the trainer."""

    def layer(block: Block, *_: Any) -> str:
        kind = block.attention.kind
        return f"layer {block.layer}, {kind.name if kind is not None else 'no attention'}"

    with ExitStack() as stack:
        stack.enter_context(_ranged(Block, "__call__", layer))
        stack.enter_context(_ranged(operators, "_attend", lambda *_: "moba_train::attention"))
        stack.enter_context(_ranged(operators, "_attend_backward", lambda *_: "moba_train::attention_backward"))
        stack.enter_context(_ranged(Watch, "phase", lambda _watch, name, _step: name, manages=True))
        yield


@contextmanager
def _ranged(owner: type | ModuleType, name: str, name_of: Callable[..., str], manages: bool = False) -> Iterator[None]:
    """Inside, calls of a function are in a range. manages: it returns a context manager, whose inside is in the range.
    name_of: the range's name, from the arguments."""
    original: Callable[..., Any] = getattr(owner, name)
    is_own = name in vars(owner)

    def called(*arguments: Any, **options: Any) -> Any:
        with record_function(name_of(*arguments)):
            return original(*arguments, **options)

    @contextmanager
    def managed(*arguments: Any) -> Iterator[Any]:
        inner: AbstractContextManager[Any] = original(*arguments)
        with record_function(name_of(*arguments)), inner as value:
            yield value

    setattr(owner, name, managed if manages else called)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
