"""The state of a GPU, read through NVML and through what nvidia-smi prints."""

import importlib.util
import re
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moba_train.health.gpu import GpuState, NvmlGpu, SmiGpu, _nvidia_smi, find_gpu
from moba_train.health.node import _uuid

UUID = "GPU-2b8fd2c5-6a5b-4c0e-9f0a-3d1f5e8c7a90"


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 15: "GPU is lost"}[value])
        self.value = value


NOT_SUPPORTED, LOST = NvmlError(3), NvmlError(15)


def nvml(**answers: Any) -> Any:
    """The part of pynvml that is asked; an answer that is an error is raised, and without one there is no function."""

    def function(answer: Any) -> Any:
        def ask(*arguments: Any) -> Any:
            value = answer(*arguments[1:]) if callable(answer) else answer
            if isinstance(value, NvmlError):
                raise value
            return value

        return ask

    names = {f"nvmlDeviceGet{name}": function(answer) for name, answer in answers.items()}
    names |= {"nvmlInit": lambda: None, "NVMLError": NvmlError, "nvmlDeviceGetIndex": lambda _: 3}
    names |= {"NVML_ERROR_GPU_IS_LOST": 15, "NVML_ERROR_RESET_REQUIRED": 16, "NVML_NVLINK_MAX_LINKS": 36}
    names |= {"NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1, "NVML_VOLATILE_ECC": 0}
    names |= {"NVML_NVLINK_ERROR_DL_REPLAY": 0, "NVML_NVLINK_ERROR_DL_RECOVERY": 1, "NVML_NVLINK_ERROR_DL_CRC_FLIT": 2}
    return SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda uuid: uuid, **names)


def test_nvml_answers_become_a_state() -> None:
    gpu = NvmlGpu(
        nvml(
            TotalEccErrors=lambda *what: 2 if what == (1, 0) else 99,
            RemappedRows=(5, 1, 1, 0),
            CurrentClocksEventReasons=0x04 | 0x08 | 0x40,
            NvLinkState=lambda link: int(link < 17) if link < 18 else NOT_SUPPORTED,
            NvLinkErrorCounter=lambda link, kind: {0: 1, 1: 0, 2: link}[kind],
        ),
        UUID,
    )
    assert gpu.name == f"GPU 3 ({UUID})"
    errors = (("replay", 17), ("recovery", 0), ("CRC", sum(range(17))))
    assert gpu.read() == GpuState("", 2, True, False, ("hardware slowdown", "thermal slowdown"), 17, errors)


def test_what_nvml_does_not_support_counts_as_nothing_wrong() -> None:
    """Consumer cards have neither ECC nor NVLink, and older packages lack functions."""
    gpu = NvmlGpu(nvml(TotalEccErrors=NOT_SUPPORTED, CurrentClocksThrottleReasons=0x80), UUID)
    state = gpu.read()
    assert state == GpuState(slowdowns=("power brake",), link_errors=state.link_errors)
    assert {count for _, count in state.link_errors} == {0}


def test_a_lost_gpu_is_told_from_a_question_that_is_not_supported() -> None:
    assert NvmlGpu(nvml(TotalEccErrors=LOST), UUID).read() == GpuState(lost="GPU is lost")


HEALTHY = {
    "--query-gpu=index": "3\n",
    "--query-gpu=ecc.errors.uncorrected.volatile.total": "0\n",
    "--query-remapped-rows=remapped_rows.pending,remapped_rows.failure": "0, 0\n",
    "--query-gpu=clocks_event_reasons.hw_slowdown,clocks_event_reasons.hw_thermal_slowdown,"
    "clocks_event_reasons.hw_power_brake_slowdown": "Not Active, Not Active, Not Active\n",
    "nvlink --status": "GPU 3: NVIDIA H200 (UUID: GPU-2b8f)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n",
    "nvlink --errorcounters": "GPU 3: NVIDIA H200 (UUID: GPU-2b8f)\n\t Link 0: Replay Errors: 0\n"
    "\t Link 0: Recovery Errors: 0\n\t Link 0: CRC Errors: 0\n\n\t Link 1: Replay Errors: 0\n"
    "\t Link 1: Recovery Errors: 0\n\t Link 1: CRC Errors: 0\n",
}
ECC, REMAPS, REASONS, STATUS, COUNTERS = list(HEALTHY)[1:]
NO_ERRORS = (("replay", 0), ("recovery", 0), ("CRC", 0))


def smi(printed: dict[str, str]) -> SmiGpu:
    """nvidia-smi that prints this; what it does not know it refuses, as the real one does."""

    def ask(arguments: list[str]) -> tuple[str, bool]:
        assert arguments[-2:] == ["-i", UUID]
        question = " ".join(arguments[:-2]).removesuffix(" --format=csv,noheader,nounits")
        known = question in printed
        return printed.get(question, f'Field "{question}" is not a valid field to query.\n'), known

    return SmiGpu(UUID, ask)


def test_what_nvidia_smi_prints_becomes_a_state() -> None:
    gpu = smi(HEALTHY)
    assert gpu.name == f"GPU 3 ({UUID})"
    assert gpu.read() == GpuState(links=2, link_errors=NO_ERRORS)
    broken = {
        ECC: "4\n",
        REMAPS: "Yes, 1\n",
        REASONS: "Active, Active, Not Active\n",
        STATUS: HEALTHY[STATUS].replace("Link 1: 26.562 GB/s", "Link 1: <inactive>"),
        COUNTERS: HEALTHY[COUNTERS]
        .replace("Replay Errors: 0", "Replay Errors: 7")
        .replace("CRC Errors: 0", "CRC Errors: 9"),
    }
    errors = (("replay", 14), ("recovery", 0), ("CRC", 18))
    expected = GpuState("", 4, True, True, ("hardware slowdown", "thermal slowdown"), 1, errors)
    assert smi(HEALTHY | broken).read() == expected


def test_what_nvidia_smi_does_not_know_counts_as_nothing_wrong() -> None:
    answers = {ECC: "[N/A]\n", REMAPS: "[Not Supported], [N/A]\n"}
    assert smi(answers).read() == GpuState(link_errors=NO_ERRORS)
    old = {REASONS.replace("event", "throttle"): "Not Active, Not Active, Active\n"}
    assert smi(old).read().slowdowns == ("power brake",)


@pytest.mark.parametrize(
    "printed",
    [
        "Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error",
        "Unable to query the GPU: GPU is lost. Reboot the system to recover this GPU",
        "[GPU requires reset]\n",
    ],
)
def test_a_gpu_that_nvidia_smi_cannot_reach_is_lost(printed: str) -> None:
    state = smi({ECC: printed}).read()
    assert state == GpuState(lost=f"nvidia-smi: {printed.strip()}")


def test_without_driver_and_package_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert find_gpu(UUID) is None


@pytest.mark.gpu
def test_the_state_of_this_machines_gpu_is_read_in_both_ways() -> None:
    """And found sound enough to train on, with both answers alike where the package is installed."""
    uuid = _uuid(torch.device("cuda", torch.cuda.current_device()))
    assert uuid is not None
    gpu = SmiGpu(uuid, _nvidia_smi)
    for question in (
        ["--query-gpu=ecc.errors.uncorrected.volatile.total"],
        ["--query-remapped-rows=remapped_rows.pending"],
    ):
        printed, succeeded = _nvidia_smi([*question, "--format=csv,noheader,nounits", "-i", uuid])
        assert succeeded, printed
        assert printed.strip()
    state = gpu.read()
    print(gpu.name, state)
    assert re.fullmatch(r"GPU \d+ \(GPU-[\w-]+\)", gpu.name), "nvidia-smi knows the UUID that torch gives"
    assert (state.lost, state.remap_failed) == ("", False)
    found = find_gpu(uuid)
    assert found is not None
    if importlib.util.find_spec("pynvml"):
        assert isinstance(found, NvmlGpu)
        print(found.name, found.read())
        assert found.name == gpu.name
        assert found.read()._replace(slowdowns=()) == state._replace(slowdowns=())
