"""Progress of a run: everything that a checkpoint stores in addition to tensors, and the recipes that can go on from
it.

Only the methods of `Progress` change it: each says what has happened in the run.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from moba_train.config.base import SAVED
from moba_train.config.data import DataConfig
from moba_train.config.explain import format_path, given
from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.data.sidecar import Fingerprint
from moba_train.errors import CheckpointError
from moba_train.resolve.run import ResolvedRun

STEPS = 10
"""Optimizer steps that are averaged on each side of a boundary."""


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Boundary:
    """Compares the last `STEPS` losses before a stage with the first `STEPS` of it.

    `observe` and `compare` return (mean before, mean after) once for each stage except the first, and None otherwise.
    """

    recent: list[float] = field(default_factory=list)
    """The latest losses of this stage, at most `STEPS`."""
    before: float | None = None
    """Mean of the latest losses of the previous stage, until the comparison is made."""

    def observe(self, loss: float) -> tuple[float, float] | None:
        """Record the loss of one more step."""
        self.recent = [*self.recent, loss][-STEPS:]
        return self.compare() if len(self.recent) == STEPS else None

    def compare(self) -> tuple[float, float] | None:
        """Compare with the losses there are; for a stage that ends before it has `STEPS` of them."""
        if self.before is None or not self.recent:
            return None
        before = self.before
        self.before = None
        return before, statistics.fmean(self.recent)

    def begin_stage(self) -> None:
        """Assign the losses that follow to the next stage."""
        if self.recent:
            self.before = statistics.fmean(self.recent)
            self.recent = []


@with_config(ConfigDict(extra="forbid"))
@dataclass
class Progress:
    """Counters of a run. Together with the seed they determine every later batch, on any number of ranks."""

    step: int = 0
    """Optimizer steps done, over all stages (skipped ones included)."""
    evaluation_due: bool = False
    """True if evaluations are due after `step` and not completed yet: a checkpoint comes before them."""
    stage: int = 0
    """Index of the current stage."""
    stage_end: int = 0
    """Step at which the current stage was to end, as of the last checkpoint."""
    stage_planned_end: int = 0
    """Step at which the `tokens` of the current stage were to be consumed, likewise; with `until` it may end later."""
    starts: dict[str, int] = field(default_factory=dict)
    """Tokens that were consumed before the current stage began, by stream (`StageData.stream_names`)."""
    logged_steps: int = 0
    """Steps whose metrics were logged."""
    run_id: str = ""
    """wandb's id, kept across restarts."""
    fingerprints: dict[str, Fingerprint] = field(default_factory=dict)
    """Fingerprint of every corpus read so far, by path."""
    chat_template: dict[str, Any] = field(default_factory=dict)
    """Chat template of the conversations that were trained on last (`StageData.chat_template`); empty for none."""
    exited_steps: dict[str, int] = field(default_factory=dict)
    """Steps that the stages took whose exit criterion was met, by the stage's name."""
    trailing_loss: float | None = None
    """Trailing loss of the last position-wise evaluation, with the stage's own attention."""
    trailing_loss_before: float | None = None
    """`trailing_loss` at the moment the current stage began."""
    steps_without_loss: int = 0
    """Steps of the current stage since the last one in which a token carried loss."""
    boundary: Boundary = field(default_factory=Boundary)
    spike_detector: dict[str, Any] = field(default_factory=dict)
    """`SpikeDetector.state_dict`, as of the last checkpoint."""
    skipped: list[int] = field(default_factory=list)
    """Steps whose batches were consumed and left out of the weights because they were flagged, oldest first."""
    rollbacks: list[list[int]] = field(default_factory=list)
    """[step_from, step_to]: after `step_from` the run went on with the weights of `step_to`. The batches in between
    were consumed, and are left out of the weights too."""
    transient_faults: list[tuple[int, list[str]]] = field(default_factory=list)
    """Steps whose values were finite only when they were run again, oldest first, with the hosts that were wrong."""
    trained_kinds: list[tuple[int, str]] = field(default_factory=list)
    """Layer and name of the attention kinds whose parameters the stages so far have used, also by recipes before the
    present one."""
    data_plan: dict[str, Any] = field(default_factory=dict)
    """Values that determine the order of the data (the function `data_plan`), as of the last checkpoint."""
    tokenizer: str = ""
    """SHA-256 of the tokenizer (the function `tokenizer_hash`), as of the last checkpoint."""

    def begin_stage(self, index: int, starts: dict[str, int]) -> None:
        """Enter the stage with this index, the next one. starts: see the field of this name."""
        self.boundary.begin_stage()
        self.stage = index
        self.starts = starts
        self.trailing_loss_before = self.trailing_loss
        self.steps_without_loss = 0

    def note_data(
        self, kinds: list[tuple[int, str]], fingerprints: Mapping[str, Fingerprint], chat_template: dict[str, Any]
    ) -> None:
        """Record the attention kinds that the current stage trains, and the corpora that it reads, by path, with the
        chat template of their conversations."""
        self.trained_kinds = kinds
        self.fingerprints |= fingerprints
        self.chat_template = chat_template or self.chat_template

    def count_step(self, *, has_loss: bool, evaluation_due: bool) -> None:
        """Count one more step, in which a token carries loss or none does."""
        self.step += 1
        self.evaluation_due = evaluation_due
        self.steps_without_loss = 0 if has_loss else self.steps_without_loss + 1

    def count_logged(self) -> None:
        """Count the current step as logged."""
        self.logged_steps += 1

    def leave_out(self) -> None:
        """Record that the current step was flagged and left out of the weights."""
        self.skipped.append(self.step)

    def roll_back(self, saved: "Progress") -> None:
        """Record that the run goes on after the current step with the weights of `saved`."""
        if saved.stage == self.stage:
            self.boundary.recent = saved.boundary.recent  # a comparison that was reported stays made
        # Steps that were skipped since then are undone with the others: they are in the range of the rollback now.
        self.skipped = [old for old in self.skipped if old <= saved.step]
        self.rollbacks.append([self.step, saved.step])

    def note_transient_fault(self, hosts: list[str]) -> None:
        """Record that the values of the current step were finite only when it was run again."""
        self.transient_faults.append((self.step, hosts))

    def expect_evaluation(self) -> None:
        """Record that evaluations are due after the current step."""
        self.evaluation_due = True

    def evaluated(self, trailing_loss: float | None) -> None:
        """Record the trailing loss that the evaluations after the current step found; None: they found none."""
        if trailing_loss is not None:
            self.trailing_loss = trailing_loss

    def end_evaluation(self, exited: Stage | None) -> None:
        """Record that the evaluations after the current step are complete. exited: the current stage if they end it."""
        if exited is not None:
            self.exited_steps[exited.name] = self.step - exited.first_step
        self.evaluation_due = False

    def prepare_save(
        self, stage: Stage, data_plan: dict[str, Any], tokenizer: str, spike_detector: dict[str, Any]
    ) -> None:
        """Record the present values of the fields that hold as of a checkpoint. stage: the current one."""
        self.stage_end = stage.end_step
        self.stage_planned_end = stage.planned_end_step
        self.data_plan = data_plan
        self.tokenizer = tokenizer
        self.spike_detector = spike_detector

    def ends_here_now(self, stage: Stage) -> bool:
        """True if the current stage ends, or may end by its criterion, at `step` by the present recipe, and did not by
        that of the checkpoint: evaluations that are due at the end of a stage have not run then."""
        ends = (stage.end_step, self.stage_end), (stage.planned_end_step, self.stage_planned_end)
        return any(self.step == now != before for now, before in ends)

    def to_meta(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)

    @staticmethod
    def from_meta(meta: Any, stages: int) -> "Progress":
        """The inverse of `to_meta`, for a recipe with this number of stages.

        Raises CheckpointError when a key is unknown or a value has a wrong type.
        """
        try:
            # Validated, not taken as it is: the meta may come from elsewhere, and its numbers index the recipe's
            # stages.
            progress = TypeAdapter(Progress).validate_python(meta)
        except ValidationError as error:
            problems = "; ".join(f"{format_path(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False))
            raise CheckpointError(f"the checkpoint's progress record is not from this version: {problems}") from None
        if progress.stage < 0 or progress.step < 0:
            raise CheckpointError(
                f"the checkpoint's progress record names step {progress.step} and stage {progress.stage}; allowed: 0 "
                "or more"
            )
        if progress.stage >= stages:
            raise CheckpointError(
                f"stages: given {stages}, but the checkpoint is of step {progress.step} in stages[{progress.stage}]; "
                "restore the stages that have begun, or set run_dir to a new folder to start afresh"
            )
        return progress


def describe_finished(progress: Progress, stages: Sequence[Stage], run_dir: Path) -> str:
    """Message about a run of which no step is left, and about the ways to go on with it."""
    last = stages[-1]
    key = f"stages.{last.index}.{'until.max_tokens' if last.until else 'tokens'}"
    longer = f"give the last stage more tokens ({key}, {last.end_token - last.first_token:,} now) or "
    if last.name in progress.exited_steps:
        longer = ""  # its exit criterion is met
    return (
        f"already finished: all {progress.step:,} steps ({last.end_token:,} tokens) are trained; checkpoints are in "
        f"{run_dir / 'checkpoints'}\n"
        f"to go on, {longer}add a stage; to train again from the start, set run_dir to a new folder"
    )


def data_plan(model: ModelConfig, data: DataConfig, seed: int, stages: Sequence[Stage]) -> dict[str, Any]:
    """Values that must stay the same for a resumed run to see the same tokens in the same order, as JSON values.

    stages: up to the current one; later stages may change, and the current one may become longer or shorter (which
        reshuffles the samples of its last group, see data/packers.py)
    """
    return {
        "seed": seed,
        "packing": data.packing,
        # Without the key: nothing is left out, as in runs from before it existed.
        **({} if data.long_conversations in ("split", "error") else {"long_conversations": data.long_conversations}),
        "model": model.model_dump(mode="json", exclude={"rope"}),
        "data": {"validation": [source.model_dump(mode="json") for source in data.validation]},
        "stages": [
            {
                "name": stage.name,
                "seq_len": stage.seq_len,
                "batch_tokens": stage.batch_tokens,
                "first_step": stage.first_step,
                "train": [source.model_dump(mode="json") for source in stage.sources],
            }
            for stage in stages
        ],
    }


def check_tokenizer(tokenizer: str, path: str | None, progress: Progress, where: str) -> None:
    """Raises CheckpointError when the recipe's tokenizer, whose hash and `path` are given, is another than at the save.

    A recipe may gain or lose its tokenizer.
    """
    if tokenizer and progress.tokenizer and tokenizer != progress.tokenizer:
        raise CheckpointError(
            f"cannot resume from {where}: data.tokenizer ({path}) is another one than when it was saved, whose SHA-256 "
            f"was {progress.tokenizer}; restore it, or set run_dir to a new folder"
        )


def check_resumable(run: ResolvedRun, progress: Progress, where: str) -> None:
    """Raises CheckpointError, naming the key, when the recipe cannot go on from `progress`, saved at `where`.

    Corpora may have moved: their contents are compared when they are opened, see run/resumable.py.
    """
    stages = run.after_exit(progress.exited_steps).stages
    now = data_plan(run.setup.shape, run.data, run.seed, stages[: progress.stage + 1])
    saved = progress.data_plan | {"model": _with_present_keys(progress.data_plan["model"])}
    for key, before, after in differences(saved, now):
        if key.endswith(".path"):
            continue  # the contents are compared
        if key == "data.validation" and not (before and after):
            continue  # evaluation was switched on or off
        raise CheckpointError(
            f"cannot resume from {where}: {_what_was(key, stages)} {given(before)} when it was saved and is "
            f"{given(after)} now; restore it, or set run_dir to a new folder to start afresh"
        )
    stage = stages[progress.stage]
    if progress.step > stage.end_step:
        key = f"stages[{stage.index}].{'until.max_tokens' if stage.until else 'tokens'}"
        raise CheckpointError(
            f"{key}: stage {stage.name} now ends at step {stage.end_step}, before the checkpoint's step "
            f"{progress.step}; make it longer, or set run_dir to a new folder"
        )


def _with_present_keys(model: dict[str, Any]) -> dict[str, Any]:
    """The saved model with the keys of this version: those that it had not yet had no effect, and others are gone."""
    try:
        return ModelConfig.model_validate(model, context=SAVED).model_dump(mode="json", exclude={"rope"})
    except ValidationError:  # of a later version
        return model


def _what_was(key: str, stages: Sequence[Stage]) -> str:
    """`KEY was`, for a key of `data_plan`: the recipe's key that determines the value."""
    if key in ("packing", "long_conversations"):
        return f"data.{key} was"
    if (found := re.fullmatch(r"stages\[(\d+)\]\.(\w+)(.*)", key)) is None:
        return f"{key} was"
    index = int(found[1])
    name, rest = found.groups()[1:]
    if name == "first_step":
        before = "stages[0]" if index == 1 else f"stages[0] to stages[{index - 1}]"
        return f"the number of steps before stages[{index}] (tokens and batch_tokens of {before}) was"
    if name in ("batch_tokens", "train") and name not in stages[index].own_keys:
        return f"{stages[index].key(name)}{rest} (or {key}) was"
    return f"{key} was"


def differences(saved: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value in `saved`, value in `now`) of all that differs between two parts of a recipe, JSON values, at `key`;
    None where one has no such key. Lists of sections that are not empty are compared section by section."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for name in {**saved, **now}:
            yield from differences(saved.get(name), now.get(name), f"{key}.{name}".lstrip("."))
    elif all(isinstance(part, list) and part and isinstance(part[0], dict) for part in (saved, now)):
        for index, (before, after) in enumerate(zip_longest(saved, now)):
            yield from differences(before, after, f"{key}[{index}]")
    elif saved != now:
        yield key, saved, now
