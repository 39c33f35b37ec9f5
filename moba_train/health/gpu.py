"""The state of a GPU as its driver tells it: through NVML where the package nvidia-ml-py is installed, else through
nvidia-smi, which comes with the driver.

A driver may hang on a broken GPU, so all of this belongs in a thread that nothing waits for without a limit.
"""

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

ANSWER_S = 20.0
"""Seconds for one answer of nvidia-smi; without persistence mode it first loads the driver, which takes several."""

_LOST = re.compile(r"GPU is lost|requires? (a )?re(set|start)|fallen off the bus|Unable to determine the device handle")
"""What nvidia-smi prints about a GPU that it cannot reach."""


class GpuState(NamedTuple):
    """One reading. What the driver does not tell counts as nothing wrong."""

    lost: str = ""
    """Why the driver cannot reach the GPU; empty where it can."""
    uncorrected_ecc: int = 0
    """Memory errors beyond correction since the driver was loaded or the GPU was reset."""
    remap_pending: bool = False
    """Whether broken memory rows wait for a reset of the GPU to be replaced by spare ones."""
    remap_failed: bool = False
    """Whether a broken memory row could not be replaced."""
    slowdowns: tuple[str, ...] = ()
    """Why the hardware runs at lower clocks at this moment; empty where it does not."""
    links: int = 0
    """Active NVLinks."""
    link_errors: tuple[tuple[str, int], ...] = ()
    """Errors of all NVLinks together, by kind: replay, recovery, CRC."""


class Gpu(Protocol):
    """A GPU whose state can be read."""

    name: str
    """For messages: number in nvidia-smi, and UUID."""

    def read(self) -> GpuState:
        """The present state. May raise anything, and may hang."""
        ...


def find_gpu(uuid: str) -> Gpu | None:
    """The GPU with this UUID ("GPU-..."); None where there is neither NVML nor nvidia-smi. May hang."""
    try:
        return NvmlGpu(importlib.import_module("pynvml"), uuid)
    except Exception:  # not installed, or its NVML does not work here: nvidia-smi has its own
        return SmiGpu(uuid, _nvidia_smi) if shutil.which("nvidia-smi") else None


class NvmlGpu:
    """Reads through NVML; `nvml` is the module pynvml."""

    _SLOWDOWNS = {0x08: "hardware slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}
    """Bits of the clocks event reasons. A software power cap is not among them: it is normal under load."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.name = f"GPU {nvml.nvmlDeviceGetIndex(self._handle)} ({uuid})"

    def read(self) -> GpuState:
        """The present state."""
        nvml = self._nvml
        try:
            ecc = self._ask("TotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            _, _, pending, failed = self._ask("RemappedRows") or (0, 0, 0, 0)
            reasons = self._ask("CurrentClocksEventReasons")
            if reasons is None:
                reasons = self._ask("CurrentClocksThrottleReasons") or 0  # its name before driver 535
            links, errors = self._links()
        except nvml.NVMLError as error:
            return GpuState(lost=str(error))
        slowdowns = tuple(name for bit, name in self._SLOWDOWNS.items() if reasons & bit)
        return GpuState("", ecc or 0, bool(pending), bool(failed), slowdowns, links, errors)

    def _links(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        nvml = self._nvml
        kinds = (
            ("replay", nvml.NVML_NVLINK_ERROR_DL_REPLAY),
            ("recovery", nvml.NVML_NVLINK_ERROR_DL_RECOVERY),
            ("CRC", nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT),
        )
        active = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if self._ask("NvLinkState", link)]
        counts = ((name, [self._ask("NvLinkErrorCounter", link, kind) or 0 for link in active]) for name, kind in kinds)
        return len(active), tuple((name, sum(errors)) for name, errors in counts)

    def _ask(self, what: str, *arguments: Any) -> Any:
        """NVML's answer; None where GPU, driver or package do not know the question. Raises NVMLError where the GPU
        cannot be reached."""
        nvml = self._nvml
        function = getattr(nvml, f"nvmlDeviceGet{what}", None)
        if function is None:
            return None
        try:
            return function(self._handle, *arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None


class SmiGpu:
    """Reads through nvidia-smi; `ask` runs it with some arguments, and returns all it printed and whether it
    succeeded."""

    _SLOWDOWNS = {
        "hw_slowdown": "hardware slowdown",
        "hw_thermal_slowdown": "thermal slowdown",
        "hw_power_brake_slowdown": "power brake",
    }

    def __init__(self, uuid: str, ask: Callable[[list[str]], tuple[str, bool]]) -> None:
        self._only = ["-i", uuid]
        self._ask = ask
        self.name = f"GPU ({uuid})"
        with suppress(_LostError):
            self.name = " ".join(["GPU", *self._query("gpu", ["index"]), f"({uuid})"])

    def read(self) -> GpuState:
        """The present state."""
        try:
            ecc = _number(self._query("gpu", ["ecc.errors.uncorrected.volatile.total"]))
            remaps = self._query("remapped-rows", ["remapped_rows.pending", "remapped_rows.failure"])
            reasons = self._query("gpu", [f"clocks_event_reasons.{name}" for name in self._SLOWDOWNS])
            if not reasons:  # their name before driver 535
                reasons = self._query("gpu", [f"clocks_throttle_reasons.{name}" for name in self._SLOWDOWNS])
            links, errors = self._links()
        except _LostError as error:
            return GpuState(lost=str(error))
        pending, failed = (answer in ("1", "Yes") for answer in remaps or ["", ""])
        active = (name for name, answer in zip(self._SLOWDOWNS.values(), reasons, strict=False) if answer == "Active")
        return GpuState("", ecc, pending, failed, tuple(active), links, errors)

    def _query(self, table: str, fields: list[str]) -> list[str]:
        """The values of these fields; empty where nvidia-smi does not know the table or one of them."""
        printed = self._run([f"--query-{table}={','.join(fields)}", "--format=csv,noheader,nounits"])
        values = [value.strip(" []") for value in printed.strip().split(",")]
        return values if len(values) == len(fields) else []

    def _links(self) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Reads lines like "Link 3: 26.562 GB/s" or "Link 3: <inactive>", and "Link 3: Replay Errors: 0"."""
        active = len(re.findall(r"Link \d+: [\d.]+ GB/s", self._run(["nvlink", "--status"])))
        errors = {"Replay": 0, "Recovery": 0, "CRC": 0}
        for kind, count in re.findall(r"Link \d+: (\w+) Errors: (\d+)", self._run(["nvlink", "--errorcounters"])):
            errors[kind] = errors.get(kind, 0) + int(count)
        return active, tuple((kind if kind.isupper() else kind.lower(), count) for kind, count in errors.items())

    def _run(self, arguments: list[str]) -> str:
        """What nvidia-smi prints about this GPU, nothing where it fails. Raises _LostError where the GPU is lost."""
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


def _number(values: list[str]) -> int:
    return int(values[0]) if values and values[0].isdigit() else 0
