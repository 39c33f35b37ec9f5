"""Clock and power of the GPUs while a program runs, and whether their power limit holds the clock down.

Read by nvidia-smi, which comes with the driver; where there is none, or one that does not know these fields, nothing is
read.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.record import spread

EVERY_MS = 200
_FIELDS = "timestamp,index,clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"


@dataclass(frozen=True)
class Sample:
    """One GPU at one moment."""

    time: float
    """When it was taken, in seconds as of `time.time`."""
    gpu: int
    clock_mhz: float
    """Clock of the multiprocessors."""
    power_w: float
    capped: bool
    """Whether the clock is lower than it could be because of the power limit."""


@dataclass
class Samples:
    """What was read; complete once the `sampled` block has ended."""

    taken: list[Sample] = field(default_factory=list)

    def summary(self, begin: float, end: float) -> dict[str, Any]:
        """Over all GPUs from `begin` to `end`: spreads of `sm_clock_mhz` and `power_w`, and `power_capped`, a share of
        the samples; nothing where there are none."""
        inside = [sample for sample in self.taken if begin <= sample.time <= end]
        if not inside:
            return {}
        return {
            "sm_clock_mhz": spread([sample.clock_mhz for sample in inside]),
            "power_w": spread([sample.power_w for sample in inside]),
            "power_capped": sum(sample.capped for sample in inside) / len(inside),
        }


@contextmanager
def sampled(gpus: int, file: Path) -> Iterator[Samples]:
    """Read the first `gpus` GPUs that this process may use, five times a second; nvidia-smi writes to `file`."""
    samples = Samples()
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    file.unlink(missing_ok=True)
    what = [f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", "-i", _ids(gpus), *what, "-lms", str(EVERY_MS), "-f", str(file)]
    reader = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield samples
    finally:
        reader.terminate()
        with suppress(subprocess.TimeoutExpired):
            reader.wait(timeout=10)  # a driver that hangs keeps it
        samples.taken = list(parse(file.read_text().splitlines())) if file.exists() else []


def _ids(gpus: int) -> str:
    """As nvidia-smi takes them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join((allowed.split(",") if allowed else list(map(str, range(gpus))))[:gpus])


def parse(lines: Sequence[str]) -> Iterator[Sample]:
    """The samples in what nvidia-smi prints, whose times are local ones. Other lines are left out."""
    for line in lines:
        with suppress(ValueError):  # a line that was not finished, an error, or "[N/A]"
            when, gpu, clock, power, capped = line.split(", ")
            yield Sample(
                datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp(),
                int(gpu),
                float(clock),
                float(power),
                capped == "Active",
            )
