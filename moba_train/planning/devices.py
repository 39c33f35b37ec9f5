"""Peak matrix rates of GPUs: dense bf16 with fp32 accumulation, without sparsity, from NVIDIA's data sheets."""

import torch

# The first name that is part of the device's name counts, so variants are listed before their family.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H200 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(device: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by the name that CUDA reports; None if it is not in the table."""
    return next((rate for name, rate in _PEAK_TFLOPS.items() if name.lower() in device.lower()), None)


def local_peak_tflops() -> float:
    """Dense bf16 TFLOP/s of this machine's first GPU, or of an H100 if that GPU is absent or unknown."""
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return peak_tflops(name) or _PEAK_TFLOPS["H100"]
