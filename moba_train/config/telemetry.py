"""The section `telemetry`: where metrics and events go."""

from typing import Literal

from pydantic import Field

from moba_train.config.base import Section


class WandbConfig(Section):
    """Weights & Biases. One run across restarts; a failing wandb never stops training."""

    mode: Literal["disabled", "offline", "online"] = Field("offline", description="offline: synchronise later by hand")
    project: str = Field("moba_train", min_length=1, description="wandb project")
    entity: str | None = Field(None, description="wandb team or user; null: the account's default")
    tags: list[str] = Field([], description="tags of the wandb run")


class TelemetryConfig(Section):
    """Metrics always go to `metrics.jsonl` in the run folder; the rest is chosen here."""

    log_every: int = Field(1, ge=1, description="optimizer steps between logged metrics")
    console: bool = Field(True, description="progress and metrics in the terminal")
    tensorboard: bool = Field(False, description="also write TensorBoard events (needs the tensorboard package)")
    plots: bool = Field(True, description="draw loss, and what was evaluated by position, as images when a run ends")
    wandb: WandbConfig = WandbConfig()
