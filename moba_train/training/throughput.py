"""Throughput of a step: tokens per second, memory, and the share of the GPU's peak rate (MFU)."""

import torch

from moba_train.config.model import ModelConfig
from moba_train.config.stages import Stage
from moba_train.parallel.world import World
from moba_train.planning.devices import peak_tflops
from moba_train.planning.flops import dense_flops, real_flops


def throughput(model: ModelConfig, stage: Stage, world: World, step_s: float) -> dict[str, float]:
    """Metrics of a step of `stage` that took `step_s` seconds. `mfu` counts the keys that the layers really attend to
    (planning/flops.py), `mfu_dense` those of full attention. On a CPU there is neither memory nor MFU."""
    rate = stage.batch_tokens / step_s
    metrics = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / world.size}
    if world.device.type != "cuda":
        return metrics
    metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    peak = peak_tflops(torch.cuda.get_device_name())
    if peak is not None:
        share = metrics["tokens_per_s_per_device"] / (peak * 1e12)
        metrics["mfu"] = share * real_flops(model, stage.attention, [stage.seq_len]) / stage.seq_len
        metrics["mfu_dense"] = share * dense_flops(model, stage.seq_len)
    return metrics
