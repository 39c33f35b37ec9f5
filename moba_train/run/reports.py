"""What a run reports about itself besides metrics: events at the current step, from its start to its end."""

from collections.abc import Callable, Sequence
from typing import Any

from moba_train.config.load import parse_config
from moba_train.config.stages import Stage
from moba_train.environment import code_version, describe_code, describe_machine
from moba_train.memory.activations import StageActivations
from moba_train.parallel.world import World
from moba_train.resolve.run import ResolvedRun
from moba_train.run.checkpoints import RunCheckpoints
from moba_train.run.evaluations import evaluation_records
from moba_train.run.progress import Progress
from moba_train.run.recipe_changes import describe_changes, rate_jump, recipe_changes, write_recipe
from moba_train.run.stop import StopTime
from moba_train.telemetry.jsonl import read_since
from moba_train.telemetry.sinks import make_telemetry
from moba_train.telemetry.telemetry import Record, SinkRun, Telemetry

STAGE = "stage"
"""Type of the records of a stage's beginning."""
BOUNDARY = "boundary"
"""Type of the records that compare the losses on both sides of a stage's beginning."""


class RunReports:
    """Opens the telemetry of a run, on rank 0 with real sinks, and words the events of its trainer."""

    telemetry: Telemetry

    def __init__(
        self,
        run: ResolvedRun,
        world: World,
        progress: Progress,
        checkpoints: RunCheckpoints,
        stages: Sequence[Stage],
        tokens: Callable[[], int],
    ) -> None:
        """Report what the run starts with: code, machine, weights, and the recipe if it has changed.

        `tokens`: gives the number consumed so far.
        """
        self._run = run
        self._progress = progress
        self._tokens = tokens
        self._device = world.device
        self.telemetry = Telemetry([])
        self._recorded: list[Record] = []
        """What an earlier start recorded at this step, also after it had saved the step's checkpoint."""
        recipe_before: str | None = None
        if world.is_main:
            run_dir = run.folders.run
            recipe_before = write_recipe(run_dir, run.recipe, progress.step)
            resumed_step = progress.step or None
            last_step = stages[-1].end_step
            again = progress.evaluation_due and checkpoints.resumed_numbers is None
            repeated = evaluation_records() if again else ()
            recipe = parse_config(run.recipe, "recipe").model_dump(mode="json") | {"code": code_version()}
            described = SinkRun(run_dir, run.name, progress.run_id, resumed_step, last_step, recipe)
            self.telemetry = make_telemetry(run.telemetry, described, repeated)
            history = read_since(run_dir / "metrics.jsonl", progress.step)
            here = (record for record in history if record["step"] == progress.step)
            self._recorded = [record for record in here if record["type"] not in repeated]
        stage = stages[progress.stage]
        self.telemetry.stage = stage.name
        machine = describe_machine(world.device, world.size, world.ranks_per_node)
        self.event("code", describe_code(code_version()), machine=machine)
        if checkpoints.loaded_weights is not None:
            self.event("init_from", checkpoints.loaded_weights)
        if progress.step:
            place = "at the end of" if progress.step == stage.end_step else "in"
            text = f"resumed from the checkpoint of step {progress.step}, {place} {stage.describe()}"
            text += checkpoints.begun_anew
            facts = _stage_facts(stage, stages[-1].end_step)
            self.event("resume", text, checkpoint_load_s=checkpoints.load_s, **facts)
            self._recipe(checkpoints.resumed_recipe, recipe_before)

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """Record an event at the current step; `fields` are JSON values."""
        self.telemetry.event(self._progress.step, self._tokens(), kind, message, **fields)

    def _recipe(self, saved: str | None, before: str | None) -> None:
        """Report in what the recipe differs from the one that the checkpoint was saved with. `before` is that of the
        start before, if it is another one."""
        changes = recipe_changes(saved, self._run.recipe) if saved is not None else {}
        where = f"the checkpoint of step {self._progress.step}"
        if changes:
            message = f"changed since {where}: {describe_changes(changes)}"
        elif before is not None and recipe_changes(before, self._run.recipe):
            message = f"again as in {where}, unlike that of the start before"
        else:
            return
        self.event("recipe", message, changed_keys=len(changes), changes=changes)
        if saved is not None and (jump := rate_jump(saved, self._run, self._progress)) is not None:
            self.event("warning", jump)

    def activations(self, found: StageActivations) -> None:
        """Report what the layers of a stage keep for their backward pass, and the memory that is predicted; nothing on
        a CPU that keeps everything."""
        if self._device.type == "cpu" and found.keeps_everything:
            return
        self.event(
            "activations",
            found.describe(),
            kept=[layer.kept.name.lower() for layer in found.layers],
            on_host=[layer.on_host for layer in found.layers],
            predicted_memory_gib=found.memory.total / 2**30,
            predicted_host_gib=found.host_bytes / 2**30,
        )

    def stage(self, stage: Stage, last_step: int) -> None:
        """Report that `stage` begins, unless an earlier start has done so at this step, in the same words; `last_step`:
        last step of the run, as far as that is known."""
        facts = {"message": stage.describe(), **_stage_facts(stage, last_step)}
        if not self.is_recorded(STAGE, stage, step=self._progress.step, **facts):
            self.event(STAGE, **facts)

    def boundary(self, stage: Stage, losses: tuple[float, float] | None) -> None:
        """Report the mean losses before and after the beginning of `stage`, where they are known, unless an
        earlier start has done so."""
        if losses is None or self.is_recorded(BOUNDARY, stage):
            return
        before, after = losses
        text = f"loss {before:.4f} before stage {stage.name}, {after:.4f} at its beginning: {after - before:+.4f}"
        self.event(BOUNDARY, text, loss_before=before, loss_after=after, loss_step=after - before)

    def is_recorded(self, event_type: str, stage: Stage, **fields: Any) -> bool:
        """Whether an earlier start recorded such an event of `stage` at the step from which the run resumed."""
        wanted = {"type": event_type, "stage": stage.name, **fields}
        return any(wanted.items() <= record.items() for record in self._recorded)

    def stop_time(self, stop_time: StopTime, save_s: float | None) -> None:
        """Report how long an orderly stop takes, where that is known for the first time or has become longer;
        `save_s`: how long the last save took."""
        if save_s is not None:
            stop_time.save_took(save_s)
        if (news := stop_time.news()) is not None:
            self.event("stop_time", news, stop_s=stop_time.seconds)

    def node(self, text: str) -> None:
        """Ask for attention to a GPU or a disk; called by the thread that watches them."""
        self.telemetry.alert("a GPU or a disk has a problem", text, "node")


def _stage_facts(stage: Stage, last_step: int) -> dict[str, Any]:
    return {"stage_index": stage.index, "seq_len": stage.seq_len, "last_step": last_step}
