"""The section `health`: loss spikes, faults of the machine, stalled ranks, and restarts that lead nowhere."""

from typing import Literal

from pydantic import Field

from moba_train.config.base import LONGEST_WAIT_S, Section


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


class WatchConfig(Section):
    """Stalled ranks and stragglers. A phase of the run (waiting for data, a step, an evaluation, a checkpoint) stalls
    when it takes much longer than it lately did; until that is known, and at most, 0.8 x parallel.timeout."""

    least: float = Field(120.0, gt=0, description="seconds before any phase counts as stalled")
    factor: float = Field(
        10.0, gt=1, description="times the median of the phase's recent times before it is called stalled"
    )
    compare_every: int = Field(
        10, ge=0, description="logged steps between comparisons of the ranks' step and attention times; 0: never"
    )


class RerunConfig(Section):
    """A step whose loss or gradient norm is not finite is run again on the same batch. A fault that repeats is reported
    with the batch's documents, and health.spike.reaction follows; one that does not, with its rank and host."""

    max_transient: int = Field(
        3,
        ge=0,
        description="faults in any 1,000 steps that did not repeat; one more ends the run with exit code 75, because a "
        "node is suspect",
    )


class NodeConfig(Section):
    """Broken GPUs (ECC, row remapping, NVLink, clocks lowered by the hardware) and full disks."""

    on_fault: Literal["refuse", "warn"] = Field(
        "refuse",
        description="what a GPU with uncorrected ECC errors or a failed row remap, or one that the driver cannot "
        "reach, means for a run that starts; refuse: it ends with exit code 75; warn: it starts, with a report",
    )
    every: float = Field(
        60.0, gt=0, le=LONGEST_WAIT_S, description="seconds between looks at GPUs and disks while the run goes on"
    )


class HealthConfig(Section):
    """Detection of loss spikes, faults of the machine, stalled ranks, stragglers, and restarts that lead nowhere."""

    spike: SpikeConfig = SpikeConfig()
    rerun: RerunConfig = RerunConfig()
    node: NodeConfig = NodeConfig()
    watch: WatchConfig = WatchConfig()
    max_restarts_without_progress: int = Field(
        20,
        ge=1,
        le=1000,
        description="starts of the run in a row that save no newer checkpoint, after which it refuses to start; those "
        "that end in order do not count. See docs/how-to/resume.md",
    )
