"""The section `telemetry`: where metrics and events go."""

from typing import Literal

from pydantic import Field

from moba_train.config.base import OpenSection, Section
from moba_train.registry import TELEMETRY_SINKS


class WandbConfig(Section):
    """Weights & Biases, which needs the package wandb (`pip install wandb`). One run across restarts; a
    failing wandb never stops training."""

    mode: Literal["disabled", "offline", "online"] = Field(
        "disabled", description="offline: written into the run folder, `wandb sync` uploads it later"
    )
    project: str = Field("moba_train", min_length=1, description="wandb project")
    entity: str | None = Field(None, description="wandb team or user; null: the account's default")
    tags: list[str] = Field([], description="tags of the wandb run")


class TelemetryConfig(OpenSection):
    """Metrics always go to `metrics.jsonl` in the run folder; the rest is chosen here."""

    members = TELEMETRY_SINKS

    log_every: int = Field(1, ge=1, description="optimizer steps between logged metrics")
    console: bool = Field(True, description="progress and metrics in the terminal")
    tensorboard: bool = Field(False, description="also write TensorBoard events, which needs `pip install tensorboard`")
    report: Literal["auto"] | bool = Field(
        "auto",
        description="write report.html, the page of `moba-train report`, when a run ends in order; auto: if plotly is "
        "installed (`pip install 'plotly>=6'`)",
    )
    wandb: WandbConfig = WandbConfig()
