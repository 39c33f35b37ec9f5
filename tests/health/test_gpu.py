"""The state of a GPU, read from the output of nvidia-smi."""

import re
import shutil

import pytest
import torch

from moba_train.health.gpu import Gpu, GpuState, _nvidia_smi, find_gpu
from moba_train.health.node import _uuid

UUID = "GPU-2b8fd2c5-6a5b-4c0e-9f0a-3d1f5e8c7a90"


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


def smi(printed: dict[str, str]) -> Gpu:
    """nvidia-smi that prints this; what it does not know it refuses, as the real one does."""

    def ask(arguments: list[str]) -> tuple[str, bool]:
        assert arguments[-2:] == ["-i", UUID]
        question = " ".join(arguments[:-2]).removesuffix(" --format=csv,noheader,nounits")
        known = question in printed
        return printed.get(question, f'Field "{question}" is not a valid field to query.\n'), known

    return Gpu(UUID, ask)


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


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert find_gpu(UUID) is None


@pytest.mark.gpu
def test_the_state_of_this_machines_gpu_is_read() -> None:
    """And found sound enough to train on."""
    uuid = _uuid(torch.device("cuda", torch.cuda.current_device()))
    assert uuid is not None
    gpu = Gpu(uuid, _nvidia_smi)
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
    assert find_gpu(uuid) is not None
