"""Devices of a run, and GPUs by name: memory, its bandwidth, peak matrix rate and compute capability.

The numbers of the table are from NVIDIA's data sheets.

The rates are dense bf16 with fp32 accumulation; data sheets that only give the rate with sparsity give twice as much.
Data sheets call a GPU's GiB "GB": CUDA reports 139.8 GiB of an H200's 141 and 79.2 of an H100's 80.

Sources: the data sheets "NVIDIA H100 Tensor Core GPU", "NVIDIA H200 Tensor Core GPU", "NVIDIA GH200 Grace Hopper
Superchip", "NVIDIA A100 Tensor Core GPU", "NVIDIA L40S", "NVIDIA DGX B200" (a system of 8 GPUs, 1,440 GB, 64 TB/s) and
"NVIDIA GB200 NVL72" (72 GPUs, 576 TB/s). The A800 and H800 are an A100 and an H100 with slower NVLink. The A100 of 80
GB is the SXM one; the PCIe card's memory is 5 % slower. Compute capabilities: NVIDIA's table "CUDA GPU Compute
Capability".
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch


@dataclass(frozen=True)
class Gpu:
    """A GPU, or the part of one that CUDA sees."""

    name: str
    tflops: float | None
    """Dense bf16 peak; None: not in the table."""
    memory: float
    """Bytes."""
    bandwidth: float | None = None
    """Bytes of its memory that are read or written in a second, the data sheet's peak; None: not in the table."""
    capability: tuple[int, int] | None = None
    """Compute capability, major and minor; None: not known."""


def _gpu(name: str, capability: tuple[int, int], tflops: float, gibibytes: int, gigabytes_per_s: int) -> Gpu:
    return Gpu(name, tflops, gibibytes * 2**30, gigabytes_per_s * 1e9, capability)


# A device's name is that of the first entry that is a part of it, so variants are listed before their family.
_GPUS = (
    _gpu("H100 PCIe", (9, 0), 756.0, 80, 2000),
    _gpu("H100 NVL", (9, 0), 835.0, 94, 3900),
    _gpu("H200 NVL", (9, 0), 835.0, 141, 4800),
    _gpu("GH200", (9, 0), 989.0, 96, 4000),
    _gpu("H200", (9, 0), 989.0, 141, 4800),
    _gpu("H100", (9, 0), 989.0, 80, 3350),
    _gpu("H800", (9, 0), 989.0, 80, 3350),
    _gpu("GB200", (10, 0), 2500.0, 186, 8000),
    _gpu("B200", (10, 0), 2250.0, 180, 8000),
    _gpu("A100-SXM4-40GB", (8, 0), 312.0, 40, 1555),
    _gpu("A100-PCIE-40GB", (8, 0), 312.0, 40, 1555),
    _gpu("A100", (8, 0), 312.0, 80, 2039),
    _gpu("A800", (8, 0), 312.0, 80, 2039),
    _gpu("L40S", (8, 9), 362.0, 48, 864),
)
GPUS_BY_NAME = {gpu.name.lower().replace(" ", "-"): gpu for gpu in _GPUS}

H200 = GPUS_BY_NAME["h200"]


def known_gpu(device: str) -> Gpu | None:
    """The GPU of the table by the name that CUDA reports, such as `NVIDIA H100 80GB HBM3`; None if it is not there."""
    return next((gpu for gpu in _GPUS if gpu.name.lower() in device.lower()), None)


def peak_tflops(device: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by the name that CUDA reports; None if it is not in the table."""
    gpu = known_gpu(device)
    return gpu.tflops if gpu is not None else None


def local_gpu(index: int = 0) -> Gpu | None:
    """This machine's GPU with this index, or the last one, with the memory and the compute capability that CUDA
    reports; None without GPUs."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(max(0, min(index, torch.cuda.device_count() - 1)))
    known = known_gpu(properties.name) or Gpu(properties.name, None, properties.total_memory)
    return replace(
        known,
        name=properties.name,
        memory=properties.total_memory,
        capability=(properties.major, properties.minor),
    )


_HOST_SHARE = 0.8
"""Part of a node's memory that offloaded activations, the optimizer's state and the copies of a save may take together;
Python and the corpora's pages need the rest."""
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Device:
    """Facts about the device of every rank on which decisions depend: those of the weakest rank."""

    gpu: Gpu | None
    """None: the run trains on CPUs."""
    host_memory: float | None
    """Bytes of the node's memory for each of its ranks; None: not known."""
    is_here: bool = True
    """True for this machine's own device: packages are looked for that it needs."""

    @property
    def type(self) -> Literal["cuda", "cpu"]:
        """torch's name for the type of the device."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def host_bytes(self) -> float | None:
        """Bytes of host memory that a rank may take for tensors of its GPU; None: not known."""
        return None if self.host_memory is None else _HOST_SHARE * self.host_memory


def local_device(local_rank: int = 0, ranks_per_node: int = 1) -> Device:
    """The device of a rank on this machine."""
    return Device(local_gpu(local_rank), local_host_memory(ranks_per_node))


def weakest(devices: Sequence[Device]) -> Device:
    """The least of all facts about these devices, which are of one type."""
    hosts = [device.host_memory for device in devices if device.host_memory is not None]
    gpus = [device.gpu for device in devices if device.gpu is not None]
    gpu = None
    if gpus:
        smallest = min(gpus, key=lambda one: one.memory)
        capabilities = [one.capability for one in gpus if one.capability is not None]
        gpu = replace(smallest, capability=min(capabilities, default=None))
    return replace(devices[0], gpu=gpu, host_memory=min(hosts, default=None))


def local_host_memory(ranks_per_node: int) -> float:
    """Bytes of this machine's memory, or of this container's, for each of its ranks."""
    limits = [float(text) for path in map(Path, _CONTAINER_LIMITS) if path.exists() and (text := _number(path))]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Twice, as `min` of a single number fails.
    return min(physical, *limits, physical) / ranks_per_node


def _number(path: Path) -> str:
    text = path.read_text().strip()
    # Without a limit, cgroup v2 has the word `max` there.
    return text if text.isdecimal() else ""
