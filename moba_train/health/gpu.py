"""The state of a GPU as its driver tells it, read through nvidia-smi, which comes with the driver.

A driver may hang on a broken GPU, so all of this belongs in a thread that nothing waits for without a limit.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

ANSWER_S = 20.0
"""Seconds for one answer of nvidia-smi; without persistence mode it first loads the driver, which takes several."""

_LOST = re.compile(r"GPU is lost|requires? (a )?re(set|start)|fallen off the bus|Unable to determine the device handle")
"""Messages of nvidia-smi about a GPU that it cannot reach."""

_SLOWDOWNS = {
    "hw_slowdown": "hardware slowdown",
    "hw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
}
"""Reasons for lower clocks, by their names in nvidia-smi. A software power cap is not among them: it is normal under
load."""


class GpuState(NamedTuple):
    """One reading. Facts that the driver does not tell count as nothing wrong."""

    lost: str = ""
    """Reason why the driver cannot reach the GPU; empty if it can."""
    uncorrected_ecc: int = 0
    """Memory errors beyond correction since the driver was loaded or the GPU was reset."""
    remap_pending: bool = False
    """True if broken memory rows wait for a reset of the GPU to be replaced by spare ones."""
    remap_failed: bool = False
    """True if a broken memory row could not be replaced."""
    slowdowns: tuple[str, ...] = ()
    """Reasons for which the hardware runs at lower clocks at this moment."""
    links: int = 0
    """Active NVLinks."""
    link_errors: tuple[tuple[str, int], ...] = ()
    """Errors of all NVLinks together, by type: replay, recovery, CRC."""


def find_gpu(uuid: str) -> "Gpu | None":
    """The GPU with this UUID ("GPU-..."); None without nvidia-smi. May hang."""
    return Gpu(uuid, _nvidia_smi) if shutil.which("nvidia-smi") else None


class Gpu:
    """A GPU whose state can be read.

    ask: runs nvidia-smi with some arguments, and returns its output and True if it succeeded
    """

    def __init__(self, uuid: str, ask: Callable[[list[str]], tuple[str, bool]]) -> None:
        self._only = ["-i", uuid]
        self._ask = ask
        self.name = f"GPU ({uuid})"
        """Name for messages: number in nvidia-smi, and UUID."""
        with suppress(_LostError):
            self.name = " ".join(["GPU", *self._query("gpu", ["index"]), f"({uuid})"])

    def read(self) -> GpuState:
        """The present state. May raise anything, and may hang."""
        try:
            ecc = self._query("gpu", ["ecc.errors.uncorrected.volatile.total"])
            remaps = self._query("remapped-rows", ["remapped_rows.pending", "remapped_rows.failure"])
            reasons = self._query("gpu", [f"clocks_event_reasons.{name}" for name in _SLOWDOWNS])
            if not reasons:  # their name before driver 535
                reasons = self._query("gpu", [f"clocks_throttle_reasons.{name}" for name in _SLOWDOWNS])
            links, errors = self._links()
        except _LostError as error:
            return GpuState(lost=str(error))
        uncorrected = int(ecc[0]) if ecc and ecc[0].isdigit() else 0
        pending, failed = (answer in ("1", "Yes") for answer in remaps or ["", ""])
        active = (name for name, answer in zip(_SLOWDOWNS.values(), reasons, strict=False) if answer == "Active")
        return GpuState("", uncorrected, pending, failed, tuple(active), links, errors)

    def _query(self, table: str, fields: list[str]) -> list[str]:
        """Values of these fields; empty if nvidia-smi does not know the table or one of them."""
        printed = self._run([f"--query-{table}={','.join(fields)}", "--format=csv,noheader,nounits"])
        values = [value.strip(" []") for value in printed.strip().split(",")]
        return values if len(values) == len(fields) else []

    def _links(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Number of active NVLinks, and their errors by type.

        Reads lines like "Link 3: 26.562 GB/s" or "Link 3: <inactive>", and "Link 3: Replay Errors: 0".
        """
        active = len(re.findall(r"Link \d+: [\d.]+ GB/s", self._run(["nvlink", "--status"])))
        errors = {"Replay": 0, "Recovery": 0, "CRC": 0}
        for kind, count in re.findall(r"Link \d+: (\w+) Errors: (\d+)", self._run(["nvlink", "--errorcounters"])):
            errors[kind] = errors.get(kind, 0) + int(count)
        return active, tuple((kind if kind.isupper() else kind.lower(), count) for kind, count in errors.items())

    def _run(self, arguments: list[str]) -> str:
        """Output of nvidia-smi about this GPU; empty if it fails. Raises _LostError when the GPU is lost."""
        printed, succeeded = self._ask([*arguments, *self._only])
        if _LOST.search(printed):
            raise _LostError(f"nvidia-smi: {' '.join(printed.split())[:200]}")
        return printed if succeeded else ""


class _LostError(Exception):
    """nvidia-smi cannot reach the GPU."""


def _nvidia_smi(arguments: list[str]) -> tuple[str, bool]:
    done = subprocess.run(
        ["nvidia-smi", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=ANSWER_S,
        check=False,
    )
    return done.stdout, done.returncode == 0
