"""From the recipe's `telemetry` section to the sinks it asks for."""

from collections.abc import Collection
from pathlib import Path

from moba_train.config.schema import RunConfig
from moba_train.telemetry.code_version import code_version
from moba_train.telemetry.console import ConsoleSink
from moba_train.telemetry.jsonl import JsonlSink
from moba_train.telemetry.telemetry import Sink, Telemetry
from moba_train.telemetry.tensorboard_sink import TensorBoardSink
from moba_train.telemetry.wandb_sink import WandbSink


def make_telemetry(
    config: RunConfig,
    run_dir: Path,
    wandb_run_id: str,
    resumed_step: int | None,
    total_steps: int,
    repeated: Collection[str] = (),
) -> Telemetry:
    """A `Telemetry` with the sinks that the recipe asks for. To be called on rank 0.

    `wandb_run_id` identifies the wandb run and stays the same across resumes (the caller stores it in the checkpoint).
    `resumed_step` is the step of the checkpoint, or None at a fresh start. `repeated`: types of records that
    are made again for that step itself. `total_steps` is the expected last step.
    Raises UserError if the package of a requested sink is missing.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    settings = config.telemetry
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", resumed_step, repeated)]
    if settings.console:
        sinks.append(ConsoleSink(total_steps))
    if settings.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", resumed_step))
    if settings.wandb.mode != "disabled":
        recipe = config.model_dump(mode="json") | {"code": code_version()}
        sinks.append(WandbSink(settings.wandb, run_dir, config.name, wandb_run_id, recipe))
    return Telemetry(sinks)
