"""The section `health`: loss spikes and faults of the machine."""

from typing import Literal

from pydantic import Field

from moba_train.config.base import Section


class SpikeConfig(Section):
    """Spikes of loss and gradient norm: one-sided robust z-score over a trailing window. See docs/how-to/monitor.md."""

    # Every checkpoint's meta holds the values, and is refused above 8 MiB.
    window: int = Field(128, ge=8, le=10_000, description="number of unflagged values that the score looks back on")
    warn_sigma: float = Field(6.0, gt=0, description="robust standard deviations above the median that flag a step")
    reaction: Literal["log", "skip_step", "rollback"] = Field(
        "log",
        description="log: report, and stop at NaN or Inf; skip_step: flagged steps leave the weights alone; rollback: "
        "that, and back to the last good checkpoint when the loss does not recover, or at NaN or Inf",
    )
    max_skips: int = Field(
        20, ge=1, description="steps to skip in any 1,000; one more ends the run (skip_step) or goes back (rollback)"
    )
    max_rollbacks: int = Field(3, ge=1, description="rollbacks in any 1,000 steps; one more ends the run")


class NodeConfig(Section):
    """Broken GPUs (ECC, row remapping, NVLink, clocks lowered by the hardware) and full disks."""

    not_here = {"every": "gone: always 60 seconds"}

    on_fault: Literal["refuse", "warn"] = Field(
        "refuse",
        description="what a GPU with uncorrected ECC errors or a failed row remap, or one that the driver cannot "
        "reach, means for a run that starts; refuse: it ends with exit code 75; warn: it starts, with a report",
    )


class HealthConfig(Section):
    """Detection of loss spikes and faults of the machine. See docs/how-to/monitor.md."""

    not_here = {
        "rerun": "gone: a fourth transient fault in 1,000 steps ends the run",
        "watch": "gone: a phase stalls after 10 times its usual time, and at least 120 s",
        "max_restarts_without_progress": "gone: always 20",
    }

    spike: SpikeConfig = SpikeConfig()
    node: NodeConfig = NodeConfig()
